"""Batches on their way to the device that computes: on a GPU one of them ahead, by a thread and a stream of their own.

thread        | batch 1 | batch 2 |         | batch 3 |               to page-locked memory, where they are not there
copies           | batch 1 | batch 2 |         | batch 3 |
computation                | batch 1           | batch 2           |
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

from lockstep.data import Data, MicroBatch
from lockstep.nested import leaves, map_leaves

T = TypeVar("T")
U = TypeVar("U")


def on_device(
    batches: Iterator[MicroBatch], device: torch.device, *, ahead: bool, pin: bool = True
) -> Iterator[MicroBatch]:
    """``batches`` with their tensors on ``device``.

    With ``ahead``, a GPU gets each while it computes with the one before. Then ``batches`` is always read one further
    than what was handed out, so that nothing in it may be collective. With ``pin``, they go through page-locked memory.
    """
    if device.type == "cpu":
        return batches
    if device.type == "cuda" and ahead:
        stream = PrefetchStream(device, pin=pin)
        return one_ahead(batches, stream.begin, stream.end)
    return (each._replace(data=to_device(each.data, device)) for each in batches)


def one_ahead(items: Iterator[T], begin: Callable[[T], U], end: Callable[[U], T]) -> Iterator[T]:
    """What ``end(begin(item))`` gives for each item; a thread begins the next one, while the script has this one."""
    with ThreadPoolExecutor(1, thread_name_prefix="lockstep-copies") as thread:
        next_one: Future[U] | None = None
        for item in items:
            this, next_one = next_one, thread.submit(begin, item)
            if this is not None:
                yield end(this.result())
            wait([next_one])  # before another item is read, for which a data set may use the memory of this one
        if next_one is not None:
            yield end(next_one.result())


class _Copied(NamedTuple):
    batch: MicroBatch
    tensors: list[torch.Tensor]  # those that are on their way
    done: torch.cuda.Event | None  # when they have arrived; None: they are still to be copied


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all passes: torch's streams come from a pool, so later ones would be shared with the exchange."""
    return torch.cuda.Stream(device)


class PrefetchStream:
    """Copies to a GPU, beside what it computes; with ``pin`` through page-locked memory."""

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self._device = device
        self._stream = _copy_stream(device)
        self._pin = pin

    def begin(self, batch: MicroBatch) -> _Copied:
        """A copy of ``batch`` that is on its way; in any thread.

        What is on a GPU already, and what holds its tensors where nobody sees them, is copied where the GPU computes.
        """
        with torch.cuda.stream(self._stream):  # also so that this thread uses no other GPU
            data = pinned(batch.data) if self._pin else batch.data
            tensors = _tensors_of(data)
            if tensors is None or any(tensor.is_cuda for tensor in tensors):
                return _Copied(batch._replace(data=data), [], None)
            data = to_device(data, self._device)
            done = self._stream.record_event()
        return _Copied(batch._replace(data=data), _tensors_of(data) or [], done)

    def end(self, copied: _Copied) -> MicroBatch:
        """The batch, for whatever is computed from here on.

        Its memory belongs to the side stream. It is used again only after what computes with it: by `record_stream`.
        """
        if copied.done is None:
            return copied.batch._replace(data=to_device(copied.batch.data, self._device))
        computing = torch.cuda.current_stream(self._device)
        # Not for the whole side stream: the copy of the next batch has begun there.
        computing.wait_event(copied.done)
        for tensor in copied.tensors:
            tensor.record_stream(computing)
        return copied.batch


def to_device(data: Data, device: torch.device) -> Data:
    """``data`` with its tensors on ``device``; from page-locked memory without waiting."""
    if device.type == "cpu":
        return data

    def moved(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    # A tokenizer's own `to` would wait for each copy.
    return map_leaves(moved, data, lambda part: hasattr(part, "to") and not isinstance(part, UserDict))


def pinned(data: Data) -> Data:
    """``data`` with its tensors in page-locked memory; what is neither a tensor nor holds any stays as it is."""

    def one_pinned(leaf: Any) -> object:
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            return leaf
        return leaf.pin_memory() if callable(getattr(leaf, "pin_memory", None)) else leaf

    return map_leaves(
        one_pinned, data, lambda part: isinstance(part, Mapping) and not isinstance(part, dict | UserDict)
    )


def _tensors_of(data: Data) -> list[torch.Tensor] | None:
    """The tensors in ``data``; None where it has parts that move themselves."""
    parts = [leaf for _, leaf in leaves(data)]
    tensors = [leaf for leaf in parts if isinstance(leaf, torch.Tensor)]
    return None if any(hasattr(leaf, "to") and not isinstance(leaf, torch.Tensor) for leaf in parts) else tensors
