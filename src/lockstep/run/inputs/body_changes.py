"""The variables and attributes of a script that the bodies of a loop change, found in the source.

    self.h = self.embed(x)                     made anew in each body: tells of the last one only
    self.mean = self.mean.lerp(length, 0.1)    made from itself: state, of which each rank has another one
    if self.mask is None: self.mask = ...      made when it is needed first
    self.rng.uniform()                         a draw, or an item of an iterator: state

What `Run.step` decides, by being asked whether a step is done, is changed once a step, and is none of these.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from types import FunctionType
from typing import Final, NamedTuple

import numpy as np
import torch

from lockstep.run.source.reachable import BUILTIN_METHODS, GENERATORS, is_told_by_values, mark_of
from lockstep.run.source.script_functions import Context, is_of, is_ours, is_run
from lockstep.run.source.script_modules import is_script
from lockstep.run.source.script_places import Place
from lockstep.run.source.source_paths import Path, is_of_comprehension
from lockstep.run.source.source_reads import Call, Change, Choice, Counted, Read, Text, Use, flat

_STEPS: Final = {"step", "update", "backward"}
_OF_TYPES: Final = (("device",), ("dtype",), ("shape",), ("ndim",), ("size",), ("dim",), ("numel",))
_CONTAINERS: Final = (list, dict, set, deque, bytearray)
#: Methods of containers that leave them as they are, or as they would be anyway; others go on from what is there.
_LOOKS_IN: Final = frozenset(
    {"copy", "count", "elements", "get", "index", "isdisjoint", "issubset", "issuperset", "items", "keys", "values"}
    | {"most_common", "total", "union", "intersection", "difference", "symmetric_difference", "clear", "decode"}
    | {"move_to_end", "popitem", "setdefault"}  # of caches, which forget what is old
)
#: What sets all of a tensor anew, or nothing of its values.
_SETS_ANEW: Final = {"zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "set_"}
_SETS_NOTHING: Final = {"requires_grad_", "retain_grad_", "share_memory_", "resize_", "detach_"}
#: Modules, and functions of them, that change the first thing that they are given.
_CHANGE_FIRST: Final = {"heapq", "heappush", "heappop", "heapreplace", "heappushpop", "bisect", "insort", "setitem"}
#: Methods of `Run` that bring together what each rank gives, and names of functions of other libraries that do.
OF_EACH_RANK: Final = {"sum", "mean", "gather"}
_MEETS: Final = re.compile(r"all_?(reduce|gather)|(gather|broadcast)_object|synchroni[sz]e")
_SEEDS: Final = {"seed", "manual_seed", "set_state", "setstate"}
_LOOKS: Final = {"get_state", "getstate", "initial_seed"}


class _Seen(NamedTuple):
    """A line of the source by which a body changes a place."""

    line: int
    from_itself: bool
    when_needed: bool  #: only while it has no value yet, or another shape
    anew: bool  #: in each body, or from the micro-batch
    sometimes: bool


class _Computed(NamedTuple):
    """The reads that the new value of a place is computed from."""

    context: Context  #: the function that makes it
    reads: tuple[Read, ...]
    in_pass: bool  #: whether it is made while a pass goes on
    change: Change
    at_step: bool  #: whether it is made where `Run.step` says that a step is done
    is_item: bool  #: whether it is an item under a computed key


class BodyChanges:
    """Collects the changes made by the functions that a body runs."""

    def __init__(self) -> None:
        self._seen: Final[dict[tuple[int, str], list[_Seen]]] = {}  # by `Place.slot`
        self._reads: Final[dict[tuple[int, str], list[_Computed]]] = {}
        self._parts: Final[dict[tuple[int, str], list[_Computed]]] = {}  # of items, by what holds the items
        self._functions: Final[set[tuple[int, ...]]] = set()
        # What is changed when a step is done, and perhaps out of bodies.
        self._elsewhere: Final[set[tuple[int, str]]] = set()
        self._beside: Final[dict[tuple[int, str], list[Place]]] = {}  # what is made when these are
        self._at_steps: Final[dict[tuple[int, str], int]] = {}  # the lines that do so within a pass

    def enter(self, context: Context) -> None:
        """Note the changes that a function makes; most of them count only if a body runs the function."""
        key = id(context.code), *(id(one.value) for one in context.arguments.values()), hash(context.conditions)
        if key in self._functions:
            return
        self._functions.add(key)
        changes = ((each, False) for each in context.reads.changes)
        items = ((each, True) for each in context.reads.items_set)
        for change, is_item in (*changes, *items):
            if (place := context.place_of(change.path)) is not None and not context.is_dead(change.guards):
                reads = (*change.value, *change.conditions)
                in_pass = context.at_step or context.covers(change.line)
                at_step = self._note_at_step(context, place, change)
                made = _Computed(context, reads, in_pass, change, at_step, is_item)
                self._reads.setdefault(place.slot, []).append(made)
                if (whole := context.place_of(change.path.holder)) is not None and whole.slot != place.slot:
                    self._parts.setdefault(whole.slot, []).append(made)
        for change in context.reads.changes:
            if context.is_dead(change.guards):
                continue
            place = context.place_of(change.path)
            if not context.covers(change.line) or asks_step(context, change.conditions):
                if place is not None and within_pass(context, change.line):
                    self._elsewhere.add(place.slot)
                continue
            from_itself = _is_made_of(context, change.value, change.path, change.conditions)
            when_needed = not from_itself and _leads_to(context, change.conditions, change.path)
            if when_needed and place is not None:
                self._beside[place.slot] = _changed_with(context, change)
            of_batch = any(context.place_of(path) is None for path, is_called in _reached(context, change.value))
            self._add(
                context,
                change.path,
                change,
                from_itself=from_itself,
                when_needed=when_needed,
                anew=not (from_itself or when_needed)
                and (of_batch or not (change.sometimes or context.called_sometimes)),
            )
        for use in context.live_uses:
            if use.read is None:
                continue
            is_bodys = context.covers(use.line) and not asks_step(context, use.conditions)
            for path, from_itself in _drawn(context, use):
                if (place := context.place_of(path)) is not None:
                    self._note_at_step(context, place, use)
                if is_bodys:
                    self._add(context, path, use, from_itself=from_itself, anew=not from_itself)
                elif place is not None and within_pass(context, use.line):
                    self._elsewhere.add(place.slot)

    def _note_at_step(self, context: Context, place: Place, at: Change | Use) -> bool:
        at_step = context.at_step or (context.covers(at.line) and asks_step(context, at.conditions))
        if at_step:
            self._at_steps.setdefault(place.slot, at.line)
        return at_step

    def _add(
        self,
        context: Context,
        path: Path,
        at: Change | Use,
        *,
        from_itself: bool,
        when_needed: bool = False,
        anew: bool = False,
    ) -> None:
        place = context.place_of(path)
        if place is not None:
            # Of what cannot be looked at, two bodies show no difference.
            value = context.value_of(path)
            is_unseen = is_of(value, set) or (_is_iterator(value) and mark_of(value) is None)
            # Of a large tensor, or of one on a GPU, the mark is the object's, and a new object has another mark anyway.
            is_unseen = is_unseen or (is_of(value, torch.Tensor) and not is_told_by_values(value))  # type: ignore[arg-type]
            seen = _Seen(at.line, from_itself, when_needed, anew, at.sometimes or context.sometimes or is_unseen)
            self._seen.setdefault(place.slot, []).append(seen)

    def reads_at(self, place: Place) -> list[_Computed]:
        """The reads that the changes of a place, and of items there, are computed from, whenever they are made."""
        owners = (place._replace(attributes=place.attributes[:end]) for end in range(len(place.attributes) + 1))
        of_owners = [one for owner in owners for one in self._reads.get(owner.slot, [])]
        return of_owners + self._parts.get(place.slot, [])

    def fills(self, place: Place) -> bool:
        """Whether lines within a pass set a place, or items of a dict there: items of a list may be there already."""
        is_dict = is_of(place.value(None), dict)
        return any(one.in_pass and (is_dict or not one.is_item) for one in self.reads_at(place))

    def makes_anew(self, place: Place) -> bool:
        """Whether bodies set a place without regard to its earlier value: the place tells of the last body only."""
        return any(one.anew for one in self._seen.get(place.slot, ()))

    def makes_when_needed(self, place: Place) -> bool:
        """Whether bodies set a place only where the value there is missing or has another shape."""
        seen = self._seen.get(place.slot, ())
        return bool(seen) and all(one.when_needed for one in seen)

    def made_with(self, place: Place) -> list[Place]:
        """The places that bodies set together with ``place``, where `makes_when_needed` is true of ``place``."""
        return self._beside.get(place.slot, [])

    def is_bodys(self, place: Place) -> bool:
        """Whether bodies compute a place from its earlier value, and no other known line changes the place."""
        seen = self._seen.get(place.slot, ())
        return bool(seen) and place.slot not in self._elsewhere and all(one.from_itself for one in seen)

    def line_at_step(self, place: Place) -> int:
        """The line that changes a place, or an item there, at the end of a step within a pass; 0 for none."""
        value = place.value(None)
        items = id(value) if is_of(value, *_CONTAINERS, torch.Tensor, np.ndarray) else 0
        return self._at_steps.get(place.slot) or next((at for (of, _), at in self._at_steps.items() if of == items), 0)

    def line_of_last(self, place: Place) -> int:
        """The line that changes a place, where a step is done, by this rank's last micro-batch of it; 0 for none."""
        made = ((one.context, one.change) for one in self.reads_at(place) if one.at_step)
        return next((of.line for at, of in made if is_of_turn(at, of.value, without=(of.path,))), 0)

    def line_of(self, place: Place, *, always: bool) -> int:
        """The line by which bodies compute a place from its earlier value; 0 for none.

        Args:
            place: of the script.
            always: whether a line counts that all bodies run. The comparison of two bodies shows such a line anyway.
        """
        seen = self._seen.get(place.slot, ())
        if any(not (one.from_itself or one.when_needed) for one in seen):
            return 0
        return next((one.line for one in seen if one.from_itself and (always or one.sometimes)), 0)


def within_pass(context: Context, line: int) -> bool:
    """Whether a line may run within a pass. True for a function that is not running: the caller is not known."""
    return context.frame is None or context.covers(line)


def reached_values(context: Context, reads: Iterable[Read]) -> Iterator[object]:
    """The known objects that ``reads`` are computed from, without objects of which only the type matters."""
    for path, is_called in _reached(context, reads):
        if path.attributes[-1:] not in _OF_TYPES:
            yield context.value_of(path.owner if is_called and path.attributes else path)


def asks_step(context: Context, reads: Iterable[Read]) -> bool:
    """Whether ``reads`` are computed from the value of `Run.step`, among others."""
    if context.reads.methods.isdisjoint(_STEPS):
        return False
    called = (path for path, is_called in _reached(context, reads) if is_called)
    return any(not _STEPS.isdisjoint(path.attributes[-1:]) for path in called)


def is_of_items(context: Context, reads: Iterable[Read], *, without: Collection[Read] = ()) -> bool:
    """Whether ``reads`` are computed from the items of this turn only, by variables that each turn sets anew.

    Reads of ``without`` do not count.
    """
    if not context.loop.items:
        return False
    filled = [read for read in reads if isinstance(read, Path) and read.root in context.loop.fresh]
    reads = [*reads, *(one for read in filled for one in context.reads.filled_from.get(read.root, ()))]
    reached = {path.root for path, _ in _reached(context, reads, context.loop.fresh, without=without)}
    stay = (reached & context.once(_changed_in_body)) - context.loop.fresh
    return not reached.isdisjoint(context.loop.items) and all(is_run(context.value_of(Path(name))) for name in stay)


def _changed_in_body(context: Context) -> frozenset[str]:
    return frozenset(change.path.root for change in context.reads.changes if context.covers(change.line))


def is_of_last_body(context: Context, name: str) -> bool:
    """Whether a variable, read after a loop over micro-batches, is what the loop's last body has made of its own."""
    return context.in_body and not context.is_between and is_of_items(context, (Path(name),))


def is_of_turn(context: Context, reads: Iterable[Read], *, without: Collection[Read] = ()) -> bool:
    """As `is_of_items`, also in a function that is given what is computed so."""
    if context.frame is None:
        roots = (path.root for path, _ in _reached(context, reads, without=without))
        return bool(context.of_items) and not context.of_items.isdisjoint(roots)
    return is_of_items(context, reads, without=without)


def is_of_all_ranks(context: Context, reads: Iterable[Read]) -> bool:
    """Whether ``reads`` hold a call that brings together what ranks have: `n = run.sum(n)`."""
    waiting = list(flat(reads))
    while waiting:
        read = waiting.pop()
        if isinstance(read, Call):
            if meets(context, read):
                return True
            waiting += flat((*read.function, *read.every))
    return False


def is_given_to_all(context: Context, name: str) -> bool:
    """Whether a variable is given to a call that brings together what ranks have: `dist.all_reduce(n)`."""
    return name in context.once(_given_to_all)


def _given_to_all(context: Context) -> frozenset[str]:
    calls = (use.read for use in context.live_uses if use.read is not None and meets(context, use.read))
    return frozenset(each.root for call in calls for each in call.every if isinstance(each, Path))


def meets(context: Context, call: Call) -> bool:
    """Whether a call brings together what ranks have: by `Run`, torch or another library."""
    path = call.function[0] if len(call.function) == 1 else None
    is_runs = isinstance(path, Path) and bool(path.attributes) and is_run(context.value_of(path.owner))
    return call.method in OF_EACH_RANK if is_runs else _MEETS.search(call.method) is not None


def gives_micro_batches(context: Context, call: Call, methods: Collection[str] = ("train", "evaluate")) -> bool:
    """Whether a call is one of these ``methods`` of `Run`, over whose micro-batches a loop goes."""
    match call.function:
        case (Path(attributes=(*_, name)) as path,) if name in methods:
            return is_run(context.value_of(path.owner))
    return False


def is_pass(context: Context, read: Read) -> bool:
    """Whether ``read`` is a call of `Run.train`, or a variable that holds what the call returned."""
    match read:
        case Path(root=name, attributes=()):
            if is_of_comprehension(name) or any(name in loop.items for loop in context.reads.loops):
                return False  # a loop over the pass sets the variable: a micro-batch
            made = [parts[0] for parts in context.reads.bound_to.get(name, ()) if len(parts) == 1]
            return any(isinstance(one, Call) and is_pass(context, one) for one in made)
        case Call():
            return gives_micro_batches(context, read, {"train"})
    return False


def goes_over_pass(context: Context, read: Read) -> bool:
    """Whether ``read`` is what `is_pass` says, or is given that."""
    inner = read.every if isinstance(read, Call) else ()
    return is_pass(context, read) or any(goes_over_pass(context, each) for each in inner)


def yields_of_turn(context: Context) -> int:
    """The line at which a generator gives what it makes of a micro-batch, not the micro-batch itself; 0 for none."""
    if is_of_all_ranks(context, context.reads.returned):
        return 0
    calls = [use for use in context.reads.uses if use.read is not None and gives_micro_batches(context, use.read)]
    loops = [loop for loop in context.reads.loops if any(use.line == loop.first for use in calls)]
    items = {name for loop in loops for name in loop.items}
    given = (read for read in context.reads.returned if not goes_over_pass(context, read))
    if all(isinstance(read, Path) and read.root in items for read in given):
        return 0
    bodies = [*((loop.first, loop.last) for loop in loops), *((use.line, use.line) for use in calls)]
    lines = (line for line in context.reads.yields if any(first <= line <= last for first, last in bodies))
    return next(lines, 0)


def _leads_to(context: Context, reads: Iterable[Read], path: Path) -> bool:
    """Whether ``reads`` are computed from the value at ``path``, or from a part of that value."""
    length = len(path.attributes)
    return any(
        each.root == path.root and each.attributes[:length] == path.attributes for each, _ in _reached(context, reads)
    )


def _changed_with(context: Context, change: Change) -> list[Place]:
    """The other places that the same function changes under the conditions of ``change``."""
    conditions = set(change.conditions)
    others = [each for each in context.reads.changes if each.path != change.path]
    places = (context.place_of(each.path) for each in others if conditions <= set(each.conditions))
    return [place for place in places if place is not None]


def _is_made_of(context: Context, reads: Iterable[Read], path: Path, conditions: Collection[Read]) -> bool:
    """Whether ``reads`` but for ``conditions`` are computed from the value at ``path``, or by its methods."""
    reached = _reached(context, (read for read in reads if read not in conditions), without=conditions)
    return any(each == path for each, is_called in reached if not is_called)


def _reached(
    context: Context,
    reads: Iterable[Read],
    through: Collection[str] | None = None,
    *,
    without: Iterable[Read] = (),
) -> Iterator[tuple[Path, bool]]:
    """The paths in the function that ``reads`` are computed from, each with whether a function there is called.

    Variables are followed to the reads that they are set from: the variables of ``through``, or all of them. Reads of
    ``without`` are not followed, such as the tests under which these variables are set.
    """
    seen: set[Read] = set(without)
    waiting = list(reads)
    while waiting:
        read = waiting.pop()
        if read in seen:
            continue
        seen.add(read)
        if isinstance(read, Path):
            yield read, False
            if through is None or read.root in through:
                waiting += context.reads.set_from.get(read.root, ())
        elif isinstance(read, Choice):
            waiting += () if context.is_dead(read.guards) else read.reads
        elif isinstance(read, Counted):
            waiting += read.items
        elif isinstance(read, Text):
            waiting += read.reads
        elif isinstance(read, Call):
            waiting += read.every
            for part in read.function:
                if isinstance(part, Path):
                    yield part, True
                waiting.append(part.owner if isinstance(part, Path) else part)


def _drawn(context: Context, use: Use) -> Iterator[tuple[Path, bool]]:
    """The objects that a call draws from or fills, each with whether the object goes on from its earlier state."""
    assert use.read is not None
    path = use.read.function[0] if len(use.read.function) == 1 else None
    if not isinstance(path, Path):
        return
    method = path.attributes[-1] if path.attributes else ""
    owner = context.value_of(path.owner) if method else None
    if is_of(owner, *_CONTAINERS) and method not in _LOOKS_IN:
        yield path.owner, True
    if is_of(owner, torch.Tensor) and in_place(method):
        yield path.owner, method not in _SETS_ANEW
    for given in (reads for name, reads in use.read.keywords if name == "out"):
        yield from ((read, read in use.read.without({"out"})) for read in given if isinstance(read, Path))
    for read in use.read.arguments[0] if path.root in _CHANGE_FIRST and use.read.arguments else ():
        if isinstance(read, Path) and is_of(context.value_of(read), *_CONTAINERS, np.ndarray):
            yield read, True
    if is_of(owner, *GENERATORS) and method not in _LOOKS:
        yield path.owner, method not in _SEEDS
    value = context.value_of(path)
    if is_of(value, *BUILTIN_METHODS) and _is_iterator(getattr(value, "__self__", None)):
        yield path, True
    for name, reads in use.read.keywords:
        if name == "generator" and len(reads) == 1 and isinstance(reads[0], Path):
            yield reads[0], True
    if path == Path("next"):
        for read in use.read.every:
            if isinstance(read, Path) and _is_iterator(context.value_of(read)):
                yield read, True


def in_place(method: str) -> bool:
    """Whether a tensor's method of this name changes its values."""
    return method.endswith("_") and not method.startswith("_") and method not in _SETS_NOTHING


def _is_iterator(value: object) -> bool:
    """Whether ``value`` is an iterator of another class than the script's own, whose source is read."""
    following = getattr(type(value), "__next__", None)
    is_read = isinstance(following, FunctionType) and is_script(following.__code__.co_filename)
    return following is not None and not (is_read or is_ours(value))
