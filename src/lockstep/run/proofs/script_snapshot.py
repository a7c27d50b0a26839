"""Snapshots of the script's objects, to be restored after bodies whose results are dropped.

    meter.total 2.1, history a list of 3        before
    meter.total 9.8, history a list of 14       after a body was tried eleven times
    meter.total 2.1, history a list of 3        put back

Restored are variables of the script's functions and modules, attributes, items of containers, random generators, and
tensors and arrays that are not large; in the objects themselves, so that all their holders see the restored values.
Files, iterators, objects of Python's own classes but containers and generators, objects that threads share (they hold a
lock, a queue or a thread), and state of packages outside of Python are not restored.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, FrameType, FunctionType, MemberDescriptorType
from typing import Any, Final

import numpy as np
import torch

from lockstep.run.source.decided_tests import is_script
from lockstep.run.source.reachable import (
    SMALL,
    is_foreign,
    is_plain,
    mark_of,
    parts_of,
    script_frames,
    script_roots,
    set_variables,
    variables_of,
)
from lockstep.run.source.script_functions import is_ours, stands_between
from lockstep.run.source.script_places import attributes_of

_DEPTH: Final = 8
_MOST: Final = 20_000  # objects
#: Of snapshots that are taken twice in each pass, which should take 10 ms at most.
_MOST_OFTEN: Final = 2_000
_LARGEST_OFTEN: Final = 1 << 16
_ABSENT: Final = object()

_Undo = Callable[[], object]
#: Modules of locks, queues and threads.
_OF_THREADS: Final = {"_thread", "threading", "queue", "_queue", "concurrent", "multiprocessing", "asyncio"}


class ScriptSnapshot:
    """A snapshot of all objects within reach of the script's running functions. Takes some milliseconds.

    Args:
        frame: from which outward.
        skip: the `id` of each object that is left out, with its contents.
        most: number of objects that are looked at, the nearest ones first.
        largest: number of elements of the largest tensors and arrays that are restored.
    """

    def __init__(
        self, frame: FrameType | None, skip: Iterable[int], *, most: int = _MOST, largest: int = SMALL
    ) -> None:
        self._largest: Final = largest
        self._undo: Final[list[_Undo]] = []
        self._seen: Final[dict[int, object]] = dict.fromkeys(skip)  # kept alive, so that no `id` is used again
        for script in script_frames(frame):
            if script.f_locals is script.f_globals:
                self._note(script.f_globals, _undo_dict)
            else:
                self._undo.append(partial(set_variables, script, variables_of(script)))
        waiting = deque((value, _DEPTH) for value in script_roots(frame).values())
        while waiting and len(self._seen) < most:
            value, left = waiting.popleft()
            if id(value) not in self._seen and not _is_left_alone(value):
                self._note_all(value)
                waiting.extend((part, left - 1) for _, part in (parts_of(value) if left else ()))

    def restore(self) -> None:
        """Restore all changed values."""
        for undo in self._undo:
            undo()

    def _note(self, value: object, undo_of: Callable[[Any], Iterator[_Undo]]) -> None:
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            self._undo.extend(undo_of(value))

    def _note_all(self, value: object) -> None:
        kind = type(value)
        if isinstance(value, torch.Tensor | np.ndarray) and math.prod(value.shape) > self._largest:
            return
        self._note(value, next((undo_of for kinds, undo_of in _KINDS if issubclass(kind, kinds)), _undo_slots))
        if isinstance(value, FunctionType):
            self._note(value.__globals__, _undo_dict)
        if type(attributes := attributes_of(value)) is dict:
            self._note(attributes, _undo_dict)
        for each in kind.__mro__:
            if not (each.__module__.partition(".")[0] in ("builtins", "torch") or is_foreign(each)):
                self._note(each, _undo_class)


def _is_left_alone(value: object) -> bool:
    """Whether an object, with its contents, is not the script's alone, but Lockstep's, Python's or also a thread's."""
    kind = type(value)
    if isinstance(value, FunctionType):
        return not is_script(value.__code__.co_filename)
    if is_ours(value):
        return True
    if any(issubclass(kind, kinds) for kinds, _ in _KINDS):
        return False
    held = attributes_of(value)
    shared = type(held) is dict and any(type(one).__module__.partition(".")[0] in _OF_THREADS for one in held.values())
    return shared or is_foreign(kind)


def _undo_dict(value: dict[Any, Any]) -> Iterator[_Undo]:
    before = dict(dict.items(value))

    def undo() -> None:
        for key in [key for key in dict.keys(value) if key not in before]:
            dict.__delitem__(value, key)
        for key, was in before.items():
            if dict.get(value, key, _ABSENT) is not was:
                dict.__setitem__(value, key, was)

    yield undo


def _undo_sequence(value: Any) -> Iterator[_Undo]:
    before = list(value)

    def undo() -> None:
        if len(value) != len(before) or any(one is not was for one, was in zip(value, before, strict=True)):
            value.clear()
            value.extend(before)

    yield undo


def _undo_set(value: set[object]) -> Iterator[_Undo]:
    before = list(value)

    def undo() -> None:
        value.clear()
        value.update(before)

    yield undo


def _undo_bytes(value: Any) -> Iterator[_Undo]:
    before = value[:]
    yield lambda: value.__setitem__(slice(None), before)


def _undo_view(value: memoryview) -> Iterator[_Undo]:
    before = bytes(value)  # a copy, since with a view the bytes below could not grow
    if not value.readonly:
        yield lambda: value.cast("B").__setitem__(slice(None), before)


def _undo_tensor(value: torch.Tensor) -> Iterator[_Undo]:
    if not is_plain(value) or value.is_inference():
        return
    before, mark = value.detach().clone(), mark_of(value)

    def undo() -> None:
        if mark_of(value) != mark:
            with torch.no_grad():
                value.copy_(before)

    yield undo


def _undo_array(value: np.ndarray[Any, Any]) -> Iterator[_Undo]:
    if value.flags.writeable:
        before = value.copy()
        yield lambda: np.copyto(value, before)


def _undo_function(value: FunctionType) -> Iterator[_Undo]:
    defaults, named = value.__defaults__, value.__kwdefaults__
    yield lambda: setattr(value, "__defaults__", defaults)
    if named is not None:
        yield from _undo_dict(named)
    for cell in value.__closure__ or ():
        if cell != CellType():  # an empty cell
            yield partial(setattr, cell, "cell_contents", cell.cell_contents)


def _undo_class(value: type) -> Iterator[_Undo]:
    before = {name: one for name, one in vars(value).items() if not name.startswith("__")}

    def undo() -> None:
        for name, was in before.items():
            if vars(value).get(name, _ABSENT) is not was:
                setattr(value, name, was)

    yield undo


def _undo_slots(value: object) -> Iterator[_Undo]:
    for kind in type(value).__mro__:
        for slot in vars(kind).values() if "__slots__" in vars(kind) else ():
            if type(slot) is MemberDescriptorType and (was := getattr(value, slot.__name__, _ABSENT)) is not _ABSENT:
                yield partial(slot.__set__, value, was)


_KINDS: Final[tuple[tuple[Any, Callable[[Any], Iterator[_Undo]]], ...]] = (
    (dict, _undo_dict),
    ((list, deque), _undo_sequence),
    (set, _undo_set),
    ((bytearray, array), _undo_bytes),
    (memoryview, _undo_view),
    (torch.Tensor, _undo_tensor),
    (np.ndarray, _undo_array),
    (torch.Generator, lambda value: iter([partial(value.set_state, value.get_state())])),
    (
        np.random.Generator,
        lambda value: iter([partial(setattr, value.bit_generator, "state", value.bit_generator.state)]),
    ),
    (np.random.RandomState, lambda value: iter([partial(value.set_state, value.get_state())])),
    (random.Random, lambda value: iter([partial(value.setstate, value.getstate())])),
    (FunctionType, _undo_function),
)


class ReplayEffects:
    """What replays change in the script's objects, to be removed: on one rank, sums are then those of a plain loop.

        before a replay     running 2.1     a list of 3     meter.count 12
        after it            running 2.8     a list of 4     meter.count 16

    Objects of a function or a class that stands between the loop and its items, such as a buffer of items, are left
    alone: items have come and gone meanwhile.
    """

    def __init__(self) -> None:
        self._before: ScriptSnapshot | None = None

    def begin_replay(self, skip: Iterable[object]) -> None:
        """Note what the script holds before a replay is handed out, but for the contents of ``skip``."""
        if self._before is None:
            between = itertools.takewhile(stands_between, script_frames(sys._getframe()))
            left_alone = [*skip, *(value for frame in between for value in variables_of(frame).values())]
            ids = map(id, left_alone)
            self._before = ScriptSnapshot(sys._getframe(), ids, most=_MOST_OFTEN, largest=_LARGEST_OFTEN)

    def end_replays(self) -> None:
        """Remove what replays have changed, before another micro-batch is handed out."""
        before, self._before = self._before, None
        if before is not None:
            before.restore()

    def forget(self) -> None:
        """Leave the loop, perhaps in a replay: changes by its body stay."""
        self._before = None
