"""Objects that each rank gives to all: whatever is in them, tensors of GPUs included, on a machine that has none."""

import os

import torch
from torch import nn

from lockstep.collectives import open_group
from lockstep.testing import run_ranks
from lockstep.torch_private import load_from_bytes
from lockstep.world import World


class Pickled:
    """What pickle is to read as ``function(*args)``."""

    def __init__(self, function, args):
        self.reduced = function, args

    def __reduce__(self):
        return self.reduced


def of_gpu(*values):
    """What arrives as a tensor of ``cuda:1``, which this machine need not have: bytes of the CPU, renamed."""
    rebuild, (storage, *rest) = torch.tensor(values).__reduce_ex__(2)
    load, (content,) = storage.__reduce__()
    assert load is load_from_bytes
    renamed = content.replace(_text("cpu"), _text("cuda:1"))
    assert renamed != content
    return Pickled(rebuild, (Pickled(load, (renamed,)), *rest))


def _text(word):
    """``word`` as pickle writes it in torch's files."""
    return b"X" + len(word).to_bytes(4, "little") + word.encode()


def gathered():
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 60)
    weight = nn.Parameter(torch.full((2,), float(group.rank)))
    found = group.gather_objects({"losses": [of_gpu(1.0, 2.0 + group.rank)], "weight": weight}, "losses")
    first = group.broadcast_object(of_gpu(7.0 + group.rank), "a loss")
    group.close()
    losses = [each["losses"][0] for each in found]
    weights = [(type(each["weight"]), each["weight"].requires_grad, each["weight"].tolist()) for each in found]
    return torch.cat([*losses, first]).tolist(), weights


def test_tensors_of_a_gpu_arrive_on_the_device_of_the_rank_that_reads_them():
    """Not on that of the rank that has sent them: `torch.cat` of parts of several GPUs fails, as does a missing GPU."""
    weights = [(nn.Parameter, True, [0.0, 0.0]), (nn.Parameter, True, [1.0, 1.0])]
    for got in run_ranks(gathered, 2):
        assert got == ([1.0, 2.0, 1.0, 3.0, 7.0], weights)
