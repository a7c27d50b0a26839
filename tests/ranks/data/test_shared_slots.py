"""Batches from loader processes: what is held stays as it is, what is dropped makes room, and all comes as it was."""

import os
import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, default_collate, get_worker_info

from loaders import Numbers, content, loader_of
from lockstep.batch import BatchPlan
from lockstep.data import shared_slots
from lockstep.data.shared_slots import SlotCollate, _Packed


class Pair(NamedTuple):
    x: torch.Tensor
    y: object


class Noted(Pair):
    """With attributes beside its fields."""


def noted():
    pair = Noted(torch.ones(2), "text")
    pair.note = "here"
    return pair


def through(collate, samples):
    """What a rank gets of them, and whether through a slot that others use; the queue between is left out."""
    packed = collate(samples)
    if not isinstance(packed, _Packed):
        return packed, False
    restore, parts = packed.__reduce__()
    return restore(*parts), parts[0] is not None


@pytest.fixture(autouse=True)
def no_regions():
    yield
    shared_slots.forget(os.getpid())
    assert not shared_slots._regions


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=30))
def test_what_is_held_stays_and_what_is_dropped_makes_room(turns):
    collate, held, in_slots = SlotCollate(torch.stack, ready=1), {}, set()
    for number, (length, drop) in enumerate(turns):
        batch, is_in_slot = through(collate, [torch.full((length,), number)] * 2)
        fits = len(in_slots) < 3
        assert is_in_slot == fits
        held[number] = batch
        in_slots |= {number} if is_in_slot else set()
        if drop:
            dropped = min(held)
            del held[dropped]
            in_slots.discard(dropped)
        del batch
        assert all((found == first).all() for first, found in held.items())


NESTS = [
    torch.arange(6.0).view(2, 3),
    [torch.tensor([1, 2]), torch.tensor([True, False, True])],
    (torch.tensor(3.5, dtype=torch.float64), "text", None, 7),
    {"a": torch.ones(3, dtype=torch.bfloat16), "b": {"c": torch.zeros(2, 2, dtype=torch.complex64)}},
    Pair(torch.arange(5, dtype=torch.int8), [torch.arange(4, dtype=torch.uint8)]),
    [torch.empty(0, 3), torch.ones(2), torch.ones(2, 4, 4, 1).permute(0, 3, 1, 2)],
    noted(),
    [torch.arange(6.0).view(2, 3).t(), torch.ones(1, 2, 2, 2).to(memory_format=torch.channels_last)],
    [torch.nn.Parameter(torch.ones(2)), torch.ones(3).to_sparse(), torch.ones(2, dtype=torch.complex64).conj()],
    "text",
]


@pytest.mark.parametrize("nest", NESTS)
def test_a_nest_comes_as_it_was(nest):
    def parts(data):
        if isinstance(data, torch.Tensor):
            plain = data.detach().to_dense().resolve_conj()
            return type(data), data.dtype, data.layout, data.requires_grad, plain.tolist(), plain.shape, plain.stride()
        if isinstance(data, dict):
            return {name: parts(part) for name, part in data.items()}
        return (type(data), getattr(data, "note", 0), *map(parts, data)) if isinstance(data, list | tuple) else data

    got, _ = through(SlotCollate(lambda samples: samples[0], ready=1), [nest])
    assert parts(got) == parts(nest)


def test_tensors_lie_at_an_allocators_boundary_and_can_be_written():
    got, is_in_slot = through(SlotCollate(list, ready=1), [torch.ones(3, dtype=torch.int8), torch.ones(5)])
    assert is_in_slot
    assert all(tensor.data_ptr() % 64 == 0 for tensor in got)
    got[0].add_(1)
    assert got[1].tolist() == [1.0] * 5


def test_a_tensor_twice_is_one_tensor():
    one = torch.ones(4)
    got, is_in_slot = through(SlotCollate(lambda samples: [one, {"again": one}], ready=1), [0])
    assert is_in_slot
    got[0].mul_(3)
    assert got[1]["again"].tolist() == [3.0] * 4


def test_a_copy_of_the_rank_frees_nothing_and_keeps_what_it_holds():
    collate = SlotCollate(torch.stack, ready=2)
    held = [through(collate, [torch.full((9,), number)])[0] for number in range(3)]
    go_on, gone_on = os.pipe()
    child = os.fork()
    if not child:
        del held[0]
        os.read(go_on, 1)
        os._exit(int([int(batch[0, 0]) for batch in held] != [1, 2]))
    last, is_in_slot = through(collate, [torch.full((9,), 9)])
    assert is_in_slot
    del last, held[1]
    later = [through(collate, [torch.full((9,), 9)]) for _ in range(2)]
    assert [is_in_slot for _, is_in_slot in later] == [True, False], "the copy may hold what was dropped here"
    assert [int(batch[0, 0]) for batch in held] == [0, 2]
    os.write(gone_on, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_copy_that_looks_at_no_batch_keeps_none():
    collate = SlotCollate(torch.stack, ready=1)
    held = [through(collate, [torch.full((9,), number)])[0] for number in range(3)]
    with shared_slots.beginning_workers():
        child = os.fork()
        if not child:
            os._exit(0)
    os.waitpid(child, 0)
    del held[1]
    assert through(collate, [torch.ones(9)])[1]


def test_a_batch_without_a_slot_holds_one_file_descriptor():
    collate = SlotCollate(list, ready=1)
    held = [collate([torch.ones(5), torch.ones(7)]) for _ in range(3)]
    process, memory, slots, _, parts = collate([torch.ones(5), torch.ones(7)])._parts
    assert (process, slots, len(held)) == (None, 1, 3)
    assert isinstance(memory, torch.Tensor)
    assert not any(isinstance(part, torch.Tensor) for part in parts)


def test_without_room_in_shared_memory_batches_come_torchs_way(monkeypatch):
    def no_room(size):
        raise RuntimeError("unable to allocate shared memory(shm)")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", no_room)
    collate = SlotCollate(default_collate, ready=1)
    assert [through(collate, [1, 2])[1] for _ in range(3)] == [False] * 3


def test_slots_leave_room_in_shared_memory_for_others(monkeypatch):
    monkeypatch.setattr(shared_slots, "_free_bytes", lambda: 2**16)
    small, large = SlotCollate(torch.stack, ready=1), SlotCollate(torch.stack, ready=1)
    assert through(small, [torch.ones(9)])[1]
    assert not isinstance(large([torch.ones(2**12)]), _Packed), "three slots of 16 KiB, and as much for torch's way"


class Asks(Dataset):
    """Samples of another size each, and a collate function that asks where it is."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.full((1 + 7 * index,), index)


def collate_and_ask(samples):
    assert get_worker_info() is not None
    return torch.cat(samples), [len(sample) for sample in samples], random.random()


def test_loader_processes_give_what_this_process_gives_whatever_is_held():
    plan = BatchPlan(4, 2, 1)
    there = loader_of(Asks(), plan, workers=2, collate_fn=collate_and_ask, shuffle=False)
    held = []
    for number, batch in enumerate(there.epoch(0, padding="none")):
        x, lengths, _ = batch.data
        assert x.tolist() == [index for index in (2 * number, 2 * number + 1) for _ in range(1 + 7 * index)]
        assert lengths == [1 + 14 * number, 8 + 14 * number]
        held.append((x, x.clone()))
        if number % 3:
            held.pop(0)
    assert all(torch.equal(x, copy) for x, copy in held)
    there.close()
    numbers = loader_of(Numbers(40), plan, workers=1, shuffle=False)
    everything = [content(batch.data) for batch in list(numbers.epoch(0, padding="none"))]
    assert everything == [(a, a + 1) for a in range(0, 40, 2)]
    assert len(shared_slots._regions) == 1
    numbers.close()


def test_the_script_may_iterate_its_loader_while_it_trains():
    loader = loader_of(Numbers(40), BatchPlan(4, 2, 1), workers=2)
    want = [content(batch.data) for batch in loader.epoch(0, padding="none")]
    got = []
    for number, batch in enumerate(loader.epoch(0, padding="none")):
        got.append(content(batch.data))
        if number == 7:
            assert content(next(iter(loader.data_loader))) == want[0]
    assert got == want
    loader.close()
