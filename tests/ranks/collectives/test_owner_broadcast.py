"""What one rank has changed arrives on all others, bit for bit, over each way."""

import os

import pytest
import torch

from lockstep.collectives import open_group, open_owner_broadcast, owner_broadcast
from lockstep.errors import PeerLost
from lockstep.testing import run_each, run_ranks
from lockstep.world import World

WAYS = ["SharedMemoryOwnerBroadcast", "BroadcastFromOwner"]


def meet():
    return open_group(World.from_env(os.environ), torch.device("cpu"), 30)


def tensors_of(rank, call):
    """Some of each kind, with bits of their own for each rank and call."""
    generator = torch.Generator().manual_seed(100 * call + rank)

    def noise(dtype, *shape):
        length = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
        top = 2 if dtype == torch.bool else 256
        drawn = torch.randint(0, top, (length,), dtype=torch.uint8, generator=generator)
        return drawn.view(dtype).reshape(shape)

    large = 40 if call == 2 else 3
    return [
        noise(torch.float32, large, 5, 7),
        noise(torch.bfloat16, 3),
        noise(torch.float64),
        noise(torch.bool, 5),
        noise(torch.float32, 0, 4),
        noise(torch.float32, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        noise(torch.int64, 6, 2).t(),
        noise(torch.complex64, 2),
    ]


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def hand_on(way):
    group = meet()
    owner_broadcast._BATCH_BYTES = 256
    line = getattr(owner_broadcast, way)(group)
    for call in range(4):
        owners = [[0, 1, 2, 0, 1, 2, 0, 1], [2, 0, 2, 0, 2, 0, 2, 0]][call % 2]
        mine = tensors_of(group.rank, call)
        strides = [t.stride() for t in mine]
        line(mine, owners)
        line([], [])
        wanted = [tensors_of(owner, call)[place] for place, owner in enumerate(owners)]
        assert list(map(bits, mine)) == list(map(bits, wanted)), call
        assert [t.stride() for t in mine] == strides
    group.barrier("all are through")
    line.close()
    group.close()
    return type(open_owner_broadcast(group)).__name__ if group.size == 1 else way


@pytest.mark.parametrize("way", WAYS)
def test_tensors_of_any_kind_arrive_from_their_owners(way):
    assert run_ranks(hand_on, 3, way) == [way] * 3


def lose_one(way):
    group = meet()
    line = getattr(owner_broadcast, way)(group)
    line([torch.ones(3), torch.ones(3)], [0, 1])
    if group.rank == 1:
        os.kill(os.getpid(), 9)
    with pytest.raises(PeerLost, match="during the handing on of parameters"):
        line([torch.ones(3), torch.ones(3)], [0, 1])
    return "told"


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_dies_is_noticed(way):
    first, second = run_each(lose_one, 2, way)
    assert isinstance(second.error, ChildProcessError), "the fault was not seen to happen"
    assert first.value == "told", first
