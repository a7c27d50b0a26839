"""Batches on their way to the device that computes: on a GPU one of them ahead, on a stream of its own.

copies        | batch 1 | batch 2 |         | batch 3 |
computation             | batch 1           | batch 2           |
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import NamedTuple, TypeVar

import torch

from lockstep.data import Data, MicroBatch

T = TypeVar("T")
U = TypeVar("U")


def on_device(batches: Iterator[MicroBatch], device: torch.device, *, ahead: bool) -> Iterator[MicroBatch]:
    """``batches`` with their tensors on ``device``.

    With ``ahead``, a GPU gets each while it computes with the one before. Then ``batches`` is always read one further
    than what was handed out, so that nothing in it may be collective.
    """
    if device.type == "cpu":
        return batches
    if device.type == "cuda" and ahead:
        stream = PrefetchStream(device)
        return one_ahead(batches, stream.begin, stream.end)
    return (each._replace(data=to_device(each.data, device)) for each in batches)


def one_ahead(items: Iterator[T], begin: Callable[[T], U], end: Callable[[U], T]) -> Iterator[T]:
    """What ``end(begin(item))`` gives for each item; the next one has begun by then."""
    begun: list[U] = []
    for item in items:
        begun.append(begin(item))
        if len(begun) == 2:
            yield end(begun.pop(0))
    if begun:
        yield end(begun.pop())


class _Copied(NamedTuple):
    batch: MicroBatch
    tensors: list[torch.Tensor]  # those that are on their way
    done: torch.cuda.Event | None  # when they have arrived


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all passes: torch's streams come from a pool, so later ones would be shared with the exchange."""
    return torch.cuda.Stream(device)


class PrefetchStream:
    """Copies to a GPU, beside what it computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _copy_stream(device)

    def begin(self, batch: MicroBatch) -> _Copied:
        """A copy of ``batch`` that is on its way.

        What is on a GPU already, and what holds its tensors where nobody sees them, is copied where the GPU computes.
        """
        tensors = _tensors_of(batch.data)
        if tensors is None or any(tensor.is_cuda for tensor in tensors):
            return _Copied(batch._replace(data=to_device(batch.data, self._device)), [], None)
        with torch.cuda.stream(self._stream):
            data = to_device(batch.data, self._device)
            done = self._stream.record_event()
        return _Copied(batch._replace(data=data), _tensors_of(data) or [], done)

    def end(self, copied: _Copied) -> MicroBatch:
        """The batch, for whatever is computed from here on.

        Its memory belongs to the side stream. It is used again only after what computes with it: by `record_stream`.
        """
        if copied.done is not None:
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


def _tensors_of(data: Data) -> list[torch.Tensor] | None:
    """The tensors in ``data``; None where it has parts that move themselves."""
    if isinstance(data, torch.Tensor):
        return [data]
    if isinstance(data, Mapping | list | tuple):
        parts = [_tensors_of(part) for part in (data.values() if isinstance(data, Mapping) else data)]
        return None if None in parts else [tensor for part in parts if part is not None for tensor in part]
    return None if hasattr(data, "to") else []
