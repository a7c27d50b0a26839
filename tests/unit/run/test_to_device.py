"""Batches on their way to the device: while one is handed out, a thread begins the next. More of it is in tests/gpu."""

import threading
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from device_costs import DEVICE
from lockstep.batch import MicroBatchPosition
from lockstep.data import MicroBatch
from lockstep.run.batches.to_device import PrefetchStream, one_ahead, pinned


@given(st.integers(0, 6))
def test_each_comes_once_and_the_next_begins_beside_what_the_script_does(length):
    begun = [threading.Event() for _ in range(length)]
    read, ended, threads = [], [], set()

    def items():
        for number in range(length):
            assert number < 2 or begun[number - 1].is_set(), "a data set may write where the one before still lies"
            read.append(number)
            yield number

    def begin(item):
        threads.add(threading.current_thread())
        begun[item].set()
        return -item

    for item in one_ahead(items(), begin, lambda half: -half):
        ended.append(item)
        assert read == list(range(min(length, len(ended) + 1)))
        # Nothing but the thread does that now.
        assert all(begun[number].wait(60) for number in read)
    assert ended == list(range(length))
    assert threading.main_thread() not in threads
    assert not any(thread.is_alive() for thread in threads)


def test_what_cannot_be_copied_is_said_where_it_would_be_handed_out():
    def begin(item):
        if item == 2:
            raise MemoryError("no page can be locked")
        return item

    batches = one_ahead(iter(range(5)), begin, lambda item: item)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(MemoryError, match="no page"):
        next(batches)


def test_the_thread_ends_with_a_pass_that_is_left():
    batches = one_ahead(iter(range(5)), lambda item: item, lambda item: item)
    next(batches)
    assert [t for t in threading.enumerate() if t.name.startswith("lockstep-copies")]
    batches.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("lockstep-copies")]


class SideStream:
    """A stream of a GPU, of which only the event is asked for here."""

    def record_event(self):
        return "it has arrived"


@pytest.mark.parametrize(
    ("make", "is_copied_aside"),
    [
        (lambda: torch.eye(3), True),
        (lambda: torch.empty(0), True),
        (lambda: torch.eye(3).to_sparse(), False),
        (lambda: torch.eye(3).to_sparse_csr(), False),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), False),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*in beta state", "ignore:.*prototype stage")
def test_tensors_for_which_torch_has_no_record_stream_are_copied_where_the_model_computes(
    monkeypatch, make, is_copied_aside
):
    monkeypatch.setattr("lockstep.run.batches.to_device._copy_stream", lambda device: SideStream())
    batch = MicroBatch(MicroBatchPosition(0, 1, last=True), {"x": torch.ones(2), "edges": [make()]})
    copied = PrefetchStream(DEVICE, pin=False).begin(batch)
    assert copied.done == ("it has arrived" if is_copied_aside else None)
    assert len(copied.tensors) == (2 if is_copied_aside else 0)


class Holder:
    """A batch of a class of its own, which knows how to go to page-locked memory."""

    def pin_memory(self):
        return "pinned"


class Named(NamedTuple):
    text: str
    number: int


def test_a_batch_goes_to_page_locked_memory_with_all_that_it_holds():
    name = Named("text", 1)
    data = [("one", "two"), {"number": 3, "holder": Holder()}, name, None, 0.5]
    assert pinned(data) == [("one", "two"), {"number": 3, "holder": "pinned"}, name, None, 0.5]
    assert type(pinned(data)[2]) is Named
