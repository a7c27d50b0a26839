"""Objects with tensors in them, from rank to rank."""

import os
from collections import namedtuple

import torch

from lockstep.collectives import ObjectChannel, open_group
from lockstep.errors import PeerLost
from lockstep.testing import run_each, run_ranks, state_hash
from lockstep.world import World

Pair = namedtuple("Pair", "left right")


def values():
    """Types that gloo has no name for, no elements, no dimension, strides, one tensor twice, and none at all."""
    torch.manual_seed(0)
    shared = torch.randn(3)
    return [
        {"out": torch.randn(2, 3, requires_grad=True), "words": ["a", 1, None]},
        Pair(torch.tensor([True, False]), torch.randn(4).bfloat16()),
        (torch.empty(0, 5), torch.tensor(7), torch.randn(2, 3, dtype=torch.complex64)),
        [torch.randn(3, 4).t(), shared, shared],
        "text",
    ]


def alike(found, given):
    """Same structure, types and bits."""
    return type(found) is type(given) and state_hash(_plain(found)) == state_hash(_plain(given))


def _plain(value):
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def passed_on():
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 30)
    relay, ahead, behind = ObjectChannel(group), (group.rank + 1) % group.size, (group.rank - 1) % group.size
    good = []
    for value in values():
        if group.rank == 0:
            relay.send(value, ahead)
        found = relay.receive(behind)
        if group.rank:
            relay.send(found, ahead)
        good.append(alike(found, value))
        mine = value if group.rank == 1 else None
        everywhere = relay.broadcast(mine, 1)
        good.append(alike(everywhere, value) and (everywhere is value or group.rank != 1))
    group.barrier("end")
    group.close()
    return good


def test_what_is_handed_on_arrives_as_it_was():
    assert run_ranks(passed_on, 3) == [[True] * 2 * len(values())] * 3


def left_alone():
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 20)
    relay = ObjectChannel(group)
    if group.rank == 0:
        relay.receive(1)  # it has opened its lines
        os._exit(7)
    relay.send("here", 0)
    return relay.receive(0)


def test_a_rank_that_is_gone_is_named_as_such():
    _, waited = run_each(left_alone, 2)
    assert isinstance(waited.error, PeerLost)
    assert "during the hand-over between stages" in str(waited.error)
