"""Models that the user has laid on several GPUs; tests/gpu trains one."""

import os

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.batch import BatchPlan, MicroBatchPosition
from lockstep.collectives import open_group
from lockstep.errors import UsageError
from lockstep.strategies import ParameterSet, StrategyContext, open_strategy
from lockstep.strategies.parts.multi_gpu import check_reached, spans_gpus
from lockstep.testing import state_hash
from lockstep.world import World
from worlds import on_world


def laid_on(*devices):
    """A model whose parameters lie on ``devices``, as far as anyone can see without having them."""
    with FakeTensorMode():
        return nn.ParameterList([nn.Parameter(torch.empty(2, device=device)) for device in devices])


@pytest.mark.parametrize(
    ("devices", "spans"),
    [
        (("cpu",), False),
        (("cuda:0",), False),
        (("cuda:1", "cuda:1"), False),
        (("cpu", "cuda:0"), False),  # half of it is not where it belongs yet
        (("cuda:0", "cuda:1"), True),
        (("cpu", "cuda:2", "cuda:3"), True),
        ((), False),
    ],
)
def test_only_several_gpus_are_a_choice(devices, spans):
    assert spans_gpus(laid_on(*devices)) is spans


def test_inputs_must_reach_the_model():
    check_reached(laid_on("cuda:0", "cuda:1"), torch.device("cuda", 1))
    check_reached(laid_on("cpu"), torch.device("cpu"))
    with pytest.raises(UsageError, match="ParameterList lies on cuda:2, cuda:3, and this rank computes on cuda:1"):
        check_reached(laid_on("cuda:2", "cuda:3"), torch.device("cuda", 1))


def stepped(device):
    """Gradients and statistics after one step under ddp, for ranks that compute on ``device``, and where they lie."""
    group = open_group(World.from_env(os.environ), torch.device(device), 30)
    strategy = open_strategy("ddp", StrategyContext(group, BatchPlan(8, 1, 2).run))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = strategy.setup_model(plain, find_unused_parameters=False)
    target = ParameterSet(tuple(model.parameters()), everything=True)
    random = torch.Generator().manual_seed(1)
    batches = torch.randn(8, 5, 3, generator=random)
    run = BatchPlan(8, 1, 2).run(group.rank, 8)
    for index in run:
        position = MicroBatchPosition(index, 8, last=index == run[-1])
        strategy.begin_micro_batch(position)
        strategy.backward(model(batches[index]).square().mean(), torch.tensor(0.125), target, position)
        strategy.end_micro_batch(position)
    found = state_hash([p.grad for p in plain.parameters()], dict(plain.named_buffers()))
    devices = {str(t.device) for p in plain.parameters() for t in (p, p.grad)}
    group.barrier("end")
    strategy.close()
    group.close()
    return found, devices


def test_what_lies_elsewhere_is_summed_on_the_ranks_own_device_and_brought_back():
    # To torch, "cpu:0" is not "cpu", though their memory is the same: as near to a second device as a CPU comes.
    here, elsewhere = on_world(2, [(stepped, "cpu"), (stepped, "cpu:0")])
    assert here[0] == here[1]
    assert elsewhere == here
    assert here[0][1] == {"cpu"}
