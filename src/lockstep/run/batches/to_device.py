"""Batches on their way to the device that computes: on a GPU one of them ahead, by a thread and a stream of their own.

thread        | batch 1 | batch 2 |         | batch 3 |               to page-locked memory, where they are not there
copies           | batch 1 | batch 2 |         | batch 3 |
computation                | batch 1           | batch 2           |
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import NamedTuple, TypeVar

import torch

from lockstep.data import Data, MicroBatch

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
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, UserDict):  # such as a tokenizer's, whose own `to` would wait for each copy
        moved = copy.copy(data)
        moved.data = {key: to_device(value, device) for key, value in data.items()}
        return moved
    if hasattr(data, "to"):
        return data.to(device)
    if isinstance(data, Mapping):
        return {key: to_device(value, device) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device) for value in data)
    return data


def pinned(data: Data) -> Data:
    """``data`` with its tensors in page-locked memory; what is neither a tensor nor holds any stays as it is."""
    if isinstance(data, torch.Tensor):
        return data if data.is_cuda else data.pin_memory()
    if isinstance(data, dict):
        return {name: pinned(part) for name, part in data.items()}
    if isinstance(data, UserDict):  # such as a tokenizer's
        held = copy.copy(data)
        held.data = {name: pinned(part) for name, part in data.items()}
        return held
    if isinstance(data, list | tuple):
        return getattr(type(data), "_make", type(data))([pinned(part) for part in data])
    return data.pin_memory() if callable(getattr(data, "pin_memory", None)) else data


def _tensors_of(data: Data) -> list[torch.Tensor] | None:
    """The tensors in ``data``; None where it has parts that move themselves."""
    if isinstance(data, torch.Tensor):
        return [data]
    if isinstance(data, Mapping | list | tuple):
        parts = [_tensors_of(part) for part in (data.values() if isinstance(data, Mapping) else data)]
        return None if None in parts else [tensor for part in parts if part is not None for tensor in part]
    return None if hasattr(data, "to") else []
