"""Where state lies, and that what is saved does not tell."""

import copy
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.collectives import TensorShard, open_group
from lockstep.errors import UsageError
from lockstep.strategies.parts.state_layout import OwnerLayout, ReplicatedLayout
from lockstep.testing import run_ranks, state_hash
from lockstep.world import World


class Net(nn.Module):
    """The embedding is the output layer, too; there is a buffer; one layer is never used."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.forgotten = nn.Linear(2, 2)
        self.out = nn.Linear(8, 11)
        self.out.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, words):
        return (self.scale * self.out(self.body(self.norm(self.embedding(words))))).float()


#: Who holds what, by the beginning of its name; of the output layer's weight, which is the embedding's, both.
HOLDERS = {"embedding": (2, 0), "out": (1,), "norm": (1, 2), "body": (0,), "scale": (2,), "forgotten": (0, 1, 2)}


def ranks_of(name):
    return HOLDERS[name.partition(".")[0]]


def holds(net, rank):
    """The parameters and buffers that ``rank`` holds, by the first of their names."""
    held = {}
    for name, tensor in net.state_dict(keep_vars=True).items():
        if rank in ranks_of(name):
            held[id(tensor)] = tensor
    return held


def learned(net, optimizer, steps=3):
    """The norms of the gradients of some steps on one rank."""
    norms = []
    for step in range(steps):
        words = torch.arange(11).roll(step)
        optimizer.zero_grad()
        F.cross_entropy(net(words), words).backward()
        norms.append(ReplicatedLayout().norm(tuple(net.parameters())).item().hex())
        optimizer.step()
    return norms


def begun():
    torch.manual_seed(4)
    net = Net()
    groups = [{"params": [net.scale], "lr": 0.5}, {"params": [p for p in net.parameters() if p is not net.scale]}]
    return net, torch.optim.AdamW(groups, lr=0.01, amsgrad=True)


def merged(states):
    """The whole state from what each rank saves; what all give whole must be the same."""
    first = states[0]
    if isinstance(first, TensorShard):
        (here,) = [part.tensor for part in states if part.tensor is not None]
        assert (tuple(here.shape), here.dtype) == (first.shape, first.dtype)
        return here
    if isinstance(first, dict):
        assert all(list(state) == list(first) for state in states)
        return {key: merged([state[key] for state in states]) for key in first}
    if isinstance(first, list | tuple):
        return [merged(list(inner)) for inner in zip(*states, strict=True)]
    assert len({state_hash(state) for state in states}) == 1
    return first


def on_rank():
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 30)
    net, optimizer = begun()
    state_layout = OwnerLayout(group)
    state_layout.setup_model(net, ranks_of)
    learned(net, optimizer, steps=2)
    words = torch.arange(11)
    optimizer.zero_grad()
    F.cross_entropy(net(words), words).backward()
    wanted = copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    norm = ReplicatedLayout().norm(tuple(net.parameters()))
    # Now forget what others hold.
    other, other_optimizer = begun()
    there = OwnerLayout(group)
    there.setup_model(other, ranks_of)
    held, here = holds(other, group.rank), holds(net, group.rank)
    pairs = zip(*(model.state_dict(keep_vars=True).values() for model in (other, net)), strict=True)
    for tensor, source in pairs:
        if id(tensor) not in held:
            tensor.data = torch.empty(0)
        elif id(source) in here and isinstance(source, nn.Parameter):
            tensor.grad = source.grad
    there.load_model(other, wanted["model"])
    there.load_optimizer(other_optimizer, wanted["optimizer"])
    got = {
        "norm": there.norm(tuple(other.parameters())).item().hex() == norm.item().hex(),
        "any": [there.any(torch.tensor([float(group.rank == one)])).item() for one in (0, 2, 5)],
        "sizes": sorted({p.numel() for p in other.parameters()}),
        "held": sorted(other_optimizer.state_dict()["state"]),
        "states": [copy.deepcopy((there.model_state(other), there.optimizer_state(other_optimizer))) for _ in range(2)],
        "wanted": state_hash(wanted["model"], wanted["optimizer"]),
        "refused": refused(there, other, wanted["model"]),
    }
    other_optimizer.step()
    optimizer.step()
    got["stepped"] = (there.model_state(other), there.optimizer_state(other_optimizer))
    got["reference"] = state_hash(net.state_dict(), optimizer.state_dict())
    group.close()
    return got


def refused(state_layout, net, state):
    less = {name: tensor for name, tensor in state.items() if name != "body.0.bias"}
    with pytest.raises(
        ValueError, match=r"^body.0.bias has the shape None there and \(8,\) here, and 1 more do not fit$"
    ):
        state_layout.load_model(net, less | {"scale": torch.ones(2)})
    return True


def with_options_in_tensors():
    """What is said where ranks have given the same numbers in tensors of other texts, and then other numbers."""
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 30)
    net, optimizer = begun()
    state_layout = OwnerLayout(group)
    state_layout.setup_model(net, lambda name: (0, 1))
    # As tensors of two GPUs do, these differ in nothing but their texts.
    rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=group.rank == 1)
    optimizer.param_groups[0] |= {"lr": rate, "betas": (rate.detach().float(), 0.9)}
    state_layout.optimizer_state(optimizer)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1 + 1e-9 * group.rank, dtype=torch.float64)
    with pytest.raises(UsageError) as caught:
        state_layout.optimizer_state(optimizer)
    group.close()
    return str(caught.value)


def test_options_in_tensors_are_compared_by_their_numbers():
    for said in run_ranks(with_options_in_tensors, 2):
        assert "lr of group 0 is 0.1 on rank 0 and 0.100000001 on rank 1." in said


def test_what_each_rank_holds_makes_the_whole_state():
    got = run_ranks(on_rank, 3)
    for told in got:
        assert told["norm"]
        assert told["any"] == [1.0, 1.0, 0.0]
        assert told["refused"]
    assert [0 in told["sizes"] for told in got] == [True] * 3, "nothing was freed"
    for states in zip(*(told["states"] for told in got), strict=True):
        assert state_hash(*merged(list(states))) == got[0]["wanted"]
    assert state_hash(*merged([told["stepped"] for told in got])) == got[0]["reference"]
    # In the optimizer's order: scale, embedding, norm (2), body (2), forgotten (2, without state), out.bias.
    assert [told["held"] for told in got] == [[1, 4, 5], [1, 2, 3, 8], [0, 1, 2, 3]]
