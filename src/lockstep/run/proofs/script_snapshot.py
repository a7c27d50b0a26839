"""Snapshots of the script's objects, to be restored after bodies whose results are dropped.

    meter.total 2.1, history a list of 3        before
    meter.total 9.8, history a list of 14       after a body was tried eleven times
    meter.total 2.1, history a list of 3        put back

Restored are variables of the script's functions, modules and classes, attributes, items of containers, random
generators, and tensors, arrays and bytes that are not large; in the objects themselves, so that all their holders see
the restored values. Left alone, with their contents, are

    objects of Lockstep and of Python's own classes     but containers; they stand for what is outside, or for a thread
    objects that threads share                          they hold a lock, a queue or a thread
    iterators and generators                            how far they are cannot be put back
    files, and state of packages outside of Python      neither can that
    objects that refuse to be read or written           as a view that was released

A thread, a file or a connection that is opened where there was none, such as at the first use, stays.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import random
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FrameType, FunctionType, GeneratorType, MemberDescriptorType, ModuleType
from typing import Any, Final

import numpy as np
import torch

from lockstep.run.source.reachable import (
    ITERATORS,
    MODULE_PARTS,
    NUMBERS,
    is_foreign,
    is_plain,
    parts_of,
    script_frames,
    script_roots,
    set_variables,
    variables_of,
)
from lockstep.run.source.script_functions import is_of, is_ours, stands_between
from lockstep.run.source.script_modules import dict_of, file_of, is_script

_MOST: Final = 20_000  # objects
_MOST_BYTES: Final = 1 << 28  # of tensors, arrays and bytes
#: The same of snapshots that are taken twice in each pass, which should take 10 ms at most.
_MOST_OFTEN: Final = 2_000
_MOST_BYTES_OFTEN: Final = 1 << 22
_ABSENT: Final = object()

_Undo = Callable[[], object]
_UndosOf = Callable[[Any], Iterator[_Undo]]
#: Modules of locks, queues and threads; and of files and connections.
_OF_THREADS: Final = {"_thread", "threading", "queue", "_queue", "concurrent", "multiprocessing", "asyncio"}
_OF_FILES: Final = {"_io", "io", "gzip", "mmap", "socket", "_socket", "sqlite3", "ssl", "subprocess", "tempfile"}


class ScriptSnapshot:
    """A snapshot of all objects within reach of the script's running functions. Takes some milliseconds.

    Args:
        frame: from which outward.
        skip: the objects that are left out, with their contents.
        most: number of objects that are looked at, the nearest ones first.
        most_bytes: size of all tensors, arrays and bytes that are copied, the nearest ones first.
    """

    def __init__(
        self, frame: FrameType | None, skip: Iterable[object], *, most: int = _MOST, most_bytes: int = _MOST_BYTES
    ) -> None:
        self._left_bytes = most_bytes
        self._undo: Final[list[_Undo]] = []
        self._seen: Final[dict[int, object]] = {
            id(one): one for one in skip
        }  # kept alive, so that no `id` is used again
        waiting = deque(script_roots(frame).values())
        for script in script_frames(frame):
            if script.f_locals is script.f_globals:
                self._note(script.f_globals, _undo_names)
            else:
                self._undo.append(partial(_restore_variables, script, variables_of(script)))
            named = (script.f_globals.get(name) for name in script.f_code.co_names)
            waiting.extend(value for value in named if issubclass(type(value), (type, ModuleType)))
        while waiting and len(self._seen) < most:
            value = waiting.popleft()
            if not (type(value) in NUMBERS or id(value) in self._seen or _is_left_alone(value)):
                self._note_all(value)
                waiting.extend(_parts(value))

    def restore(self) -> None:
        """Restore all changed values."""
        for undo in self._undo:
            with contextlib.suppress(Exception):  # an object may refuse to be written
                undo()

    def _note(self, value: object, *undos_of: _UndosOf) -> None:
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            for each in undos_of:
                with contextlib.suppress(Exception):  # an object may refuse to be read
                    self._undo.extend(list(each(value)))

    def _note_all(self, value: Any) -> None:
        kind = type(value)
        own = [undos_of for kinds, undos_of in _KINDS if issubclass(kind, kinds)][:1]
        if (size := _bytes_of(value)) <= self._left_bytes:
            self._left_bytes -= size
        else:
            own = [_undo_growth]
        self._note(value, *own, _undo_gradient, _undo_slots)
        if is_of(value, FunctionType):
            self._note(value.__globals__, _undo_names)
        if type(attributes := dict_of(value)) is dict:
            self._note(attributes, _undo_names)
            for part in MODULE_PARTS:
                if type(attributes.get(part)) is dict:
                    self._note(attributes[part], _undo_names)
        for each in kind.__mro__:
            if not (each.__module__.partition(".")[0] in ("builtins", "torch") or is_foreign(each)):
                self._note(each, _undo_class)


def _is_left_alone(value: Any) -> bool:
    """Whether an object, with its contents, is not the script's alone, or cannot be put back."""
    kind = type(value)
    if is_of(value, FunctionType):
        return not is_script(value.__code__.co_filename)
    if issubclass(kind, (type, ModuleType)):
        module = value if is_of(value, ModuleType) else sys.modules.get(getattr(value, "__module__", ""))
        return module is None or not file_of(module)
    if is_ours(value) or issubclass(kind, (GeneratorType, *ITERATORS)) or _is_shared(value):
        return True
    return is_foreign(kind) and not any(issubclass(kind, kinds) for kinds, _ in _KINDS)


def _is_shared(value: object) -> bool:
    """Whether threads share an object: the object is a thread, a lock or a queue, or holds one."""
    attributes = dict_of(value)
    holds = type(attributes) is dict and any(_is_of(_OF_THREADS, one) for one in attributes.values())
    return holds or _is_of(_OF_THREADS, value)


def _stays(value: object) -> bool:
    """Whether an object that is there now is open to the outside: one that a body opens at its first use."""
    return _is_of(_OF_FILES, value) or _is_shared(value)


def _is_of(modules: set[str], value: object) -> bool:
    return any(each.__module__.partition(".")[0] in modules for each in type(value).__mro__)


def _parts(value: Any) -> Iterator[object]:
    """What lies one step from an object."""
    if issubclass(type(value), (type, ModuleType)):
        yield from _named(value).values()
    else:
        yield from (part for _, part in parts_of(value))
    if is_of(value, FunctionType):
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values())


def _named(value: type | ModuleType) -> dict[str, object]:
    """The variables of a class or a module, without those of Python."""
    return {name: one for name, one in vars(value).items() if not name.startswith("__")}


def _bytes_of(value: Any) -> int:
    """The size of what a snapshot copies of one object, without its contents."""
    kind = type(value)
    with contextlib.suppress(ValueError):  # a view that was released
        if issubclass(kind, (torch.Tensor, np.ndarray, memoryview)):
            return int(value.nbytes) if kind is not torch.Tensor or is_plain(value) else 0
    if issubclass(kind, array):
        return len(value) * int(value.itemsize)
    sized = next((base for base in (bytearray, list, deque, dict, set) if issubclass(kind, base)), None)
    return 0 if sized is None else sized.__len__(value) * (1 if sized is bytearray else 8)


# ---- how one object is restored --------------------------------------------------------------------------------------


def _are_same(now: Collection[object], before: Collection[object]) -> bool:
    """Whether these are the same objects. They are not asked whether they are equal: that may be the script's code."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _restore_variables(frame: FrameType, before: dict[str, Any]) -> None:
    now = variables_of(frame)
    set_variables(frame, {name: was for name, was in _changed(before, now).items() if was is not _ABSENT})


def _undo_names(value: dict[str, Any]) -> Iterator[_Undo]:
    """Of variables or attributes, in no order."""
    yield partial(_restore_names, dict(value), value, value.__setitem__, value.__delitem__)


def _undo_class(value: type) -> Iterator[_Undo]:
    # Not by `setattr`, for which a class of classes may have its own rules.
    put, remove = partial(type.__setattr__, value), partial(type.__delattr__, value)
    before = _named(value)
    yield lambda: _restore_names(before, _named(value), put, remove)


def _restore_names(
    before: Mapping[str, object],
    now: Mapping[str, object],
    put: Callable[[str, object], object],
    remove: Callable[[str], object],
) -> None:
    for name, was in _changed(before, now).items():
        if was is _ABSENT:
            remove(name)
        else:
            put(name, was)


def _changed(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, object]:
    """What is to be put back under each name; `_ABSENT` for names that were not there.

    Where a body has opened a file or a thread, all that is new there stays with it: `self.file, self.writer`.
    """
    names = [name for name in {**before, **now} if now.get(name, _ABSENT) is not before.get(name, _ABSENT)]
    opened = any(_stays(now.get(name)) for name in names)
    back = {name: before.get(name, _ABSENT) for name in names}
    return {name: was for name, was in back.items() if not (opened and (was is None or was is _ABSENT))}


def _undo_dict(value: dict[Any, Any]) -> Iterator[_Undo]:
    # Not by methods of a subclass, which may be the script's; those of `dict` leave the order of an `OrderedDict`.
    base = OrderedDict if issubclass(type(value), OrderedDict) else dict
    keys, values = list(base.keys(value)), list(base.values(value))

    def undo() -> None:
        if not (_are_same(base.keys(value), keys) and _are_same(base.values(value), values)):
            base.clear(value)
            for key, was in zip(keys, values, strict=True):
                base.__setitem__(value, key, was)

    yield undo


def _undo_sequence(value: Any) -> Iterator[_Undo]:
    base: Any = list if issubclass(type(value), list) else deque
    before = list(base.__iter__(value))

    def undo() -> None:
        if not _are_same(list(base.__iter__(value)), before):
            base.clear(value)
            base.extend(value, before)

    yield undo


def _undo_growth(value: Any) -> Iterator[_Undo]:
    """Of a list that is too long to be copied; of no other object that is too large."""
    if issubclass(type(value), list):
        length = list.__len__(value)
        yield lambda: list.__delitem__(value, slice(length, None))


def _undo_set(value: set[object]) -> Iterator[_Undo]:
    before = list(set.__iter__(value))

    def undo() -> None:
        if not _are_same(list(set.__iter__(value)), before):  # an equal set may have another order
            set.clear(value)
            set.update(value, before)

    yield undo


def _undo_bytes(value: Any) -> Iterator[_Undo]:
    before = value[:]
    yield lambda: value == before or value.__setitem__(slice(None), before)


def _undo_view(value: memoryview) -> Iterator[_Undo]:
    if not value.readonly and value.contiguous:
        before = bytes(value)  # a copy, since with a view the bytes below could not grow
        yield lambda: value.tobytes() == before or value.cast("B").__setitem__(slice(None), before)


def _undo_tensor(value: torch.Tensor) -> Iterator[_Undo]:
    if not is_plain(value) or value.is_inference():
        return
    before = value.detach().clone()

    def undo() -> None:
        if value.shape != before.shape:
            value.data = before
        elif not torch.equal(value.detach(), before):  # `Tensor._version` counts no change by `.data`
            with torch.no_grad():
                value.copy_(before)

    yield undo


def _undo_gradient(value: Any) -> Iterator[_Undo]:
    """Of a leaf that the run does not train, such as of a discriminator that steps by itself, whatever its size."""
    if not (issubclass(type(value), torch.Tensor) and value.is_leaf and value.requires_grad):
        return
    gradient = value.grad
    before = None if gradient is None else gradient.detach().clone()

    def undo() -> None:
        value.grad = gradient
        if gradient is not None and before is not None:
            with torch.no_grad():
                gradient.copy_(before)

    yield undo


def _undo_array(value: np.ndarray[Any, Any]) -> Iterator[_Undo]:
    if value.flags.writeable:
        before = value.copy()

        def undo() -> None:
            if value.tobytes() != before.tobytes():
                np.copyto(value, before)

        yield undo


def _undo_function(value: FunctionType) -> Iterator[_Undo]:
    defaults, named = value.__defaults__, value.__kwdefaults__
    yield lambda: setattr(value, "__defaults__", defaults)
    if named is not None:
        yield from _undo_names(named)
    for cell in value.__closure__ or ():
        if cell != CellType():  # an empty cell
            yield partial(_restore_cell, cell, cell.cell_contents)


def _restore_cell(cell: CellType, was: object) -> None:
    if cell.cell_contents is not was and not _stays(cell.cell_contents):
        cell.cell_contents = was


def _undo_slots(value: object) -> Iterator[_Undo]:
    for kind in type(value).__mro__:
        for slot in vars(kind).values() if "__slots__" in vars(kind) else ():
            if type(slot) is MemberDescriptorType:
                yield partial(_restore_slot, slot, value, _in_slot(slot, value))


def _in_slot(slot: MemberDescriptorType, value: object) -> object:
    try:
        return slot.__get__(value)
    except AttributeError:  # not set
        return _ABSENT


def _restore_slot(slot: MemberDescriptorType, value: object, was: object) -> None:
    now = _in_slot(slot, value)
    if now is was or _stays(now):
        return
    if was is _ABSENT:
        slot.__delete__(value)
    else:
        slot.__set__(value, was)


_KINDS: Final[tuple[tuple[Any, _UndosOf], ...]] = (
    (dict, _undo_dict),
    ((list, deque), _undo_sequence),
    (set, _undo_set),
    ((bytearray, array), _undo_bytes),
    (memoryview, _undo_view),
    (torch.Tensor, _undo_tensor),
    (np.ndarray, _undo_array),
    (type, _undo_class),
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
            self._before = ScriptSnapshot(sys._getframe(), left_alone, most=_MOST_OFTEN, most_bytes=_MOST_BYTES_OFTEN)

    def end_replays(self) -> None:
        """Remove what replays have changed, before another micro-batch is handed out."""
        before, self._before = self._before, None
        if before is not None:
            before.restore()

    def forget(self) -> None:
        """Leave the loop, perhaps in a replay: changes by its body stay."""
        self._before = None
