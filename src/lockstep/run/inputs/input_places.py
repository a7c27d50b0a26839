"""The places that a training is computed from, as `training_inputs` finds them.

A place is a variable of the script, or an attribute or an item of an object, that outlives a body.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from types import FunctionType, MethodType, ModuleType
from typing import Final, Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.run.source.reachable import mark_of
from lockstep.run.source.script_places import Held, Place, held, values_at
from lockstep.run.source.source_paths import Path
from lockstep.run.source.source_reads import Read

_ITEM: Final = re.compile(r"(.*)\[[^\[\]]*\]")  # of a container

STEPS: Final = ("step", "backward", "update")  #: the methods of `Run` by which a script trains
NOTED: Final = {"step", "write", "exit"}  #: kinds of what each body computes, and each turn of an outer loop
FOLLOWED: Final = NOTED | {"told", "seed"}  #: kinds of what is followed to the script's variables
LENGTH: Final = "len(run.train(...))"  #: what a `RankUse` is on, if not on an attribute of `Run`
#: What a line of the script is told for, see `TrainingInputs.lines`.
GRADIENTS: Final = (
    "no gradients are left to read or clip, since run.step(...) has used them. Give Run(clip_norm=...); or read and "
    "change gradients where run.backward(...) has returned True, and then call run.update()"
)
CLOCK: Final = (
    "each rank's own clock decides how long the training goes on: ranks may leave the loop at different steps, and "
    "other numbers of ranks train for other numbers of steps. `any(run.gather(time.time() > end))` asks all clocks"
)
#: Kinds of objects that are no state by themselves, or that the run has.
STATELESS: Final = (ModuleType, type, FunctionType, MethodType, nn.Module, Optimizer, property)
_CLOCKS: Final = (
    *(time.time, time.monotonic, time.perf_counter, time.process_time, time.thread_time, time.clock_gettime),
    *(time.time_ns, time.monotonic_ns, time.perf_counter_ns, time.process_time_ns),
    *(vars(datetime)["now"], vars(datetime)["utcnow"], vars(date)["today"]),
)
#: The modules of objects that hold what no checkpoint has.
_STORES: Final = {"sqlite3", "_io", "queue", "_queue", "shelve", "multiprocessing.queues"}


class Given(NamedTuple):
    """A value that the script gives to the run."""

    kind: Literal["step", "write", "exit", "told", "registered", "loader", "seed"]  #: how: see `given_by`
    what: str  #: in the script's words
    where: str  #: a line of it
    reads: tuple[Read, ...] = ()  #: what it is computed from
    is_kept: bool = False  #: whether a file that is written after the loop holds the value


class RankUse(NamedTuple):
    """A value given to the run that depends on the rank, or on the number of ranks."""

    given: Given
    on: str


@dataclass
class TrainingInputs:
    """The places that a training is computed from."""

    places: dict[tuple[int, str, tuple[str, ...]], tuple[Place, str]] = field(default_factory=dict)
    #: Of each, what is computed from it.
    ranks: list[RankUse] = field(default_factory=list)
    skip: set[int] = field(default_factory=set)  #: the `id` of what the run has
    anew: set[tuple[int, str, tuple[str, ...]]] = field(default_factory=set)  #: places that each body sets anew
    when_needed: set[tuple[int, str, tuple[str, ...]]] = field(default_factory=set)  #: or when needed
    of_bodies: set[tuple[int, str, tuple[str, ...]]] = field(default_factory=set)  #: that nothing else changes
    filled: set[tuple[int, str, tuple[str, ...]]] = field(default_factory=set)  #: that lines within a pass set or fill
    kept: set[tuple[int, str, tuple[str, ...]]] = field(default_factory=set)  #: in files written after the loop
    #: Of places that are made when needed, what is made with them, as the table of which a number is the length.
    made_with: dict[tuple[int, str, tuple[str, ...]], list[Place]] = field(default_factory=dict)
    read_names: set[str] = field(default_factory=set)  #: of attributes that something here is computed from
    asked: dict[str, str] = field(default_factory=dict)  #: what is computed from a call of `Run`, by the call's place
    own: dict[int, str] = field(default_factory=dict)  #: what tells a reader of own micro-batches alone, by lines
    lines: dict[str, str] = field(default_factory=dict)  #: the first of the script for `GRADIENTS` or `CLOCK`
    carried: str = ""  #: a variable of these that the loop's body changes, whenever it does; "" for none
    failed: str = ""  #: why the script could not be read, in words; "" where it could
    _texts: Counter[str] = field(default_factory=Counter)
    _slots: set[tuple[int, str]] = field(default_factory=set)  # see `Place.slot`

    @property
    def _kinds(self) -> tuple[set[tuple[int, str, tuple[str, ...]]], ...]:
        return self.anew, self.when_needed, self.of_bodies, self.filled

    @property
    def _lasting(self) -> dict[tuple[int, str, tuple[str, ...]], tuple[Place, str]]:
        """The places that neither tell of the last body only nor are made when needed."""
        others = self.anew | self.when_needed
        return {key: place for key, place in self.places.items() if key not in others}

    def note(self, place: Place, what: str, *, is_kept: bool = False) -> None:
        """Note that ``what`` is computed from ``place``; the second place with the same text gets a number."""
        if is_kept:
            self.kept.add(place.key)
        if place.key not in self.places and place.slot not in self._slots:
            self._slots.add(place.slot)
            self._texts[place.text] += 1
            same = self._texts[place.text]
            text = f"{place.text} ({same})" if same > 1 else place.text
            self.places[place.key] = place._replace(text=text), what

    def held(self) -> Held:
        """The values at these places now."""
        return held(self.places.values(), self.skip, STATELESS, self.read_names)

    def rebound(self, owner_of: Callable[[object], object]) -> TrainingInputs:
        """The same places with other owners of variables, such as the functions of a later loop."""
        found = replace(self, places={}, anew=set(), when_needed=set(), of_bodies=set(), filled=set(), made_with={})
        for key, (place, what) in self.places.items():
            there = place._replace(owner=owner_of(place.owner))
            found.places[there.key] = there, what
            for kind, same in zip(self._kinds, found._kinds, strict=True):
                if key in kind:
                    same.add(there.key)
            if key in self.made_with:
                made = self.made_with[key]
                found.made_with[there.key] = [each._replace(owner=owner_of(each.owner)) for each in made]
        return found

    def held_between(self) -> Held:
        """The same, without places that tell of the last body only or are made when needed."""
        return held(self._lasting.values(), self.skip, STATELESS, self.read_names)

    def values_between(self) -> dict[str, tuple[object, str]]:
        """The values themselves at the places of `held_between`, and what is computed from each."""
        return {place.text: (value, what) for place, what, value in values_at(self._lasting.values())}

    def note_own(self, what: str, line: int, source: str) -> None:
        """Note that ``what`` a reader is told has a ``source`` of own micro-batches alone, with a gap for the line."""
        self.own.setdefault(line, f"{what} is computed from {source.format(line)}")

    def may_change(self, names: Container[str]) -> list[tuple[Place, str]]:
        """The places that steps may change: variables, and attributes and keys of these ``names``."""
        return [each for each in self._lasting.values() if not each[0].attributes or each[0].attributes[-1] in names]

    def held_of_bodies(self) -> Held:
        """Only places that nothing but a body changes, and their items; not attributes, of which less is known."""
        places = [(place, what) for key, (place, what) in self.places.items() if key in self.of_bodies]
        found = held(places, self.skip, STATELESS, self.read_names)
        starts = tuple(f"{place.text}[" for place, _ in places)
        themselves = {place.text for place, _ in places}
        return {name: each for name, each in found.items() if name in themselves or name.startswith(starts)}

    def themselves(self, found: Held) -> Held:
        """Of what `held` has found, the places themselves.

        Not parts of objects: a package's may be set anew in each body, as an environment is that begins again, and one
        callback in a list decides nothing for another.
        """
        texts = {place.text for place, _ in self.places.values()}
        return {name: each for name, each in found.items() if name in texts}

    def items_of(self, found: Held) -> Held:
        """Of what `held` has found, items of dicts that bodies fill, and of containers that bodies make."""
        keys = self.filled | self.of_bodies | self.when_needed
        texts = {place.text for key, (place, _) in self.places.items() if key in keys}
        return {name: each for name, each in found.items() if (item := _ITEM.fullmatch(name)) and item[1] in texts}

    def held_when_needed(self) -> Held:
        """Only places that bodies make when needed, without the length of a table, of which ranks need other parts."""
        needed = (
            place
            for key, place in self.places.items()
            if key in self.when_needed and not _is_length(place[0], self.made_with.get(key, []))
        )
        return held(needed, self.skip, STATELESS, self.read_names)


def _is_length(place: Place, tables: list[Place]) -> bool:
    """Whether the number at ``place`` is a dimension of each of the ``tables`` that are made with the number."""
    number, made = place.value(None), [table.value(None) for table in tables]
    return type(number) is int and bool(made) and all(isinstance(one, Tensor) and number in one.shape for one in made)


def is_clock(function: object) -> bool:
    """Whether a function tells the time."""
    return any(function is clock for clock in _CLOCKS)


def opaque_read(path: Path, function: object, owner: object, *, ends_loop: bool) -> str:
    """The clock, the file or the store that a call reads, in words; "" for any other call.

    Args:
        path: of the called function.
        function: at that path, if known.
        owner: the object whose method is called.
        ends_loop: whether the value decides only how long a loop goes on, for which a script may read a clock.
    """
    if not ends_loop and is_clock(function):
        return f"the clock, by {path.text}()"
    if function is open:
        return f"what {path.text}(...) reads, which no checkpoint has"
    is_store = type(owner).__module__ in _STORES and mark_of(owner) is None
    return f"what {path.owner.text} holds, which no checkpoint has" if is_store else ""
