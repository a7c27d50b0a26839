"""Copies of batches to the device: on a GPU one batch ahead, by a separate thread and stream.

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

    With ``ahead``, a GPU gets each batch while it computes with the batch before. Then ``batches`` is always read one
    further than handed out, so that reading must not be collective. With ``pin``, batches go through page-locked
    memory.
    """
    if device.type == "cpu":
        return batches
    if device.type == "cuda" and ahead:
        stream = PrefetchStream(device, pin=pin)
        return one_ahead(batches, stream.begin, stream.end)
    return (each._replace(data=to_device(each.data, device)) for each in batches)


def one_ahead(items: Iterator[T], begin: Callable[[T], U], end: Callable[[U], T]) -> Iterator[T]:
    """The result of ``end(begin(item))`` for each item; a thread begins the next item while the script has one."""
    with ThreadPoolExecutor(1, thread_name_prefix="lockstep-copies") as thread:
        next_one: Future[U] | None = None
        for item in items:
            this, next_one = next_one, thread.submit(begin, item)
            if this is not None:
                yield end(this.result())
            wait([next_one])  # before another item is read, for which a data set may reuse this item's memory
        if next_one is not None:
            yield end(next_one.result())


class _Copied(NamedTuple):
    batch: MicroBatch
    tensors: list[torch.Tensor]  # tensors that are being copied
    done: torch.cuda.Event | None  # their arrival; None: they are still to be copied


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for all passes: torch's streams come from a pool, so a later one could be that of the reduction."""
    return torch.cuda.Stream(device)


class PrefetchStream:
    """Copies to a GPU, beside its computation; with ``pin`` through page-locked memory."""

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self._device = device
        self._stream = _copy_stream(device)
        self._pin = pin

    def begin(self, batch: MicroBatch) -> _Copied:
        """Begin a copy of ``batch``; may be called in any thread.

        A batch that is on a GPU already, or whose tensors are not visible or have no `record_stream`, is copied in the
        computing stream.
        """
        with torch.cuda.stream(self._stream):  # also so that this thread uses no other GPU
            data = pinned(batch.data) if self._pin else batch.data
            tensors = _tensors_of(data)
            if tensors is None or any(tensor.is_cuda or not _is_plain(tensor) for tensor in tensors):
                return _Copied(batch._replace(data=data), [], None)
            data = to_device(data, self._device)
            done = self._stream.record_event()
        return _Copied(batch._replace(data=data), _tensors_of(data) or [], done)

    def end(self, copied: _Copied) -> MicroBatch:
        """The batch, for computations that are queued from now on.

        Its memory belongs to the side stream; by `record_stream`, it is reused only after computations with it.
        """
        if copied.done is None:
            return copied.batch._replace(data=to_device(copied.batch.data, self._device))
        computing = torch.cuda.current_stream(self._device)
        # Not for the whole side stream, in which the copy of the next batch has begun.
        computing.wait_event(copied.done)
        for tensor in copied.tensors:
            tensor.record_stream(computing)
        return copied.batch


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether all elements of ``tensor`` lie in one block of memory, as torch's `record_stream` needs."""
    return tensor.layout == torch.strided and not tensor.is_nested


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
    """``data`` with its tensors in page-locked memory; parts without tensors are unchanged."""

    def one_pinned(leaf: Any) -> object:
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            return leaf
        return leaf.pin_memory() if callable(getattr(leaf, "pin_memory", None)) else leaf

    return map_leaves(
        one_pinned, data, lambda part: isinstance(part, Mapping) and not isinstance(part, dict | UserDict)
    )


def _tensors_of(data: Data) -> list[torch.Tensor] | None:
    """The tensors in ``data``; None if it has parts with a ``to`` method of their own."""
    parts = [leaf for _, leaf in leaves(data)]
    tensors = [leaf for leaf in parts if isinstance(leaf, torch.Tensor)]
    return None if any(hasattr(leaf, "to") and not isinstance(leaf, torch.Tensor) for leaf in parts) else tensors
