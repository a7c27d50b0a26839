"""The inputs of a training beside the micro-batch, which must be the same on all ranks.

    threshold = float(np.median(confidence))      of this rank's part of an evaluation: other ranks have another one
    if run.leads: smooth = 0.0                    on one rank only

The script is read once for each loop (`training_inputs`). Ranks compare, with what a checkpoint would
hold, what was the same on all of them when it was seen first, and what no body sets by itself. Of numbers and texts
they compare all values since the last comparison, for ranks that decide by themselves may agree again:

    if run.step(loss) and loss.item() < 0.3: smooth = 0.1        after step 7 on rank 0, after step 9 on rank 1
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Final, NamedTuple

from lockstep.launch_contract import OWN_MICRO_BATCHES
from lockstep.run.inputs.input_places import TrainingInputs
from lockstep.run.inputs.told_parts import part_told
from lockstep.run.inputs.training_inputs import training_inputs
from lockstep.run.source.decided_tests import ChangedNames
from lockstep.run.source.line_calls import LineCalls
from lockstep.run.source.reachable import (
    CACHES,
    Mark,
    changed,
    look,
    script_frames,
    script_roots,
    size_of,
    tells_values,
)
from lockstep.run.source.script_functions import PLAIN
from lockstep.run.source.script_places import Held, Place, changed_since, values_at
from lockstep.run.state.registered import State

#: Loops that are read in any case; of later ones, one in so many steps.
_FREE_READINGS: Final = 2
_STEPS_A_READING: Final = 5000  # of which one takes some 10 ms


_Loop = tuple[tuple[CodeType, int], ...]
"""The running functions around a loop, each with its line."""


class Since(NamedTuple):
    """Two marks of the value at a place."""

    first: Mark  #: when it was seen first
    now: Mark


class _Item(NamedTuple):
    """An item of a container that bodies fill, as seen last."""

    mark: Mark
    where: tuple[int, int]  #: after which body
    stays: bool = False  #: whether another body has left the item as it was


_STAYS: Final = Mark(0, "", "made once")  # equal on all ranks: then the values there must be
_CHANGES: Final = Mark(0, "", "changes")  # the same, of a place's changes


def _tells(mark: Mark) -> bool:
    """Whether a mark tells a value that a body has made; None and flags may tell that a rank had no need of it yet."""
    return (mark.rank == 1 and mark.kind not in ("NoneType", "bool")) or tells_values(mark)


class _Function(NamedTuple):
    """Stands for a function that was running, as the owner of a variable, after its loop was left."""

    number: int
    code: CodeType


def _loop_around(frame: FrameType) -> _Loop:
    return tuple((each.f_code, each.f_lineno) for each in script_frames(frame))


class SharedInputs:
    """The inputs of the loop that the script is in.

    Args:
        state: what the run holds.
        several: whether there are several ranks; on one rank no marks are taken.
        say: prints a line for the user.
    """

    def __init__(self, state: State, *, several: bool, say: Callable[[str], None]) -> None:
        self._state: Final = state
        self._several: Final = several
        self._say: Final = say
        self._before_body: tuple[_Loop, Mapping[str, Mark]] | None = None
        self._told_read: Final[set[_Loop]] = set()
        self._changes: object = None  # of the bodies since `_before_body`, as they were looked at last
        self._said: Final[set[str]] = set()
        self._inputs: TrainingInputs | None = None
        self._frames: list[FrameType] = []  # of the loop that was read
        # Of loops that were left, by the functions that were running: these are places in them by their number.
        self._known: Final[dict[tuple[CodeType, ...], TrainingInputs]] = {}
        self._read_at = 0
        self._first: Final[dict[str, Mark]] = {}
        self._moved: Final[set[str]] = set()  # by bodies
        self._items: Final[dict[str, _Item]] = {}  # of containers that bodies fill
        self._watched: list[tuple[Place, str]] = []  # numbers and texts that steps may change
        self._newest: Final[dict[str, object]] = {}  # of these, after the last step
        # Of the steps since ranks were compared: what is computed, and a checksum of all changes.
        self._histories: Final[dict[str, tuple[str, int]]] = {}
        self._partly: Final[set[str]] = set()  # watched in some of these steps only: ranks read at different times
        self._began: Held = {}  # what bodies may change, when the loop was read
        self._left: dict[str, Since] = {}  # as the last loop was left
        self.calls: Final = LineCalls()  #: what the lines of bodies were seen to run

    def read_script(self, frame: FrameType) -> TrainingInputs:
        """Read the script from ``frame`` outward, before the training begins."""
        inputs = training_inputs(frame, self._state, self.calls)
        self._note_first(inputs)
        return inputs

    def read_loop(self, step: int) -> None:
        """Read the loop that the script is in after ``step`` steps, unless the loop has been read; takes some 10 ms."""
        if self._inputs is not None and not self.calls.is_new:
            return
        frames = script_frames(sys._getframe())
        if not self.calls.is_new and self._take_up(frames):
            return
        if self.calls.is_new or len(self._known) < _FREE_READINGS or step - self._read_at >= _STEPS_A_READING:
            self._read_at = step
            self._inputs = training_inputs(sys._getframe(), self._state, self.calls)
            self.calls.seen()
            self._note_first(self._inputs)
            for about, line in self._inputs.lines.items():
                self._say_once(f"{line}: {about}")
        self._begin(frames)

    def begin_pass(self, step: int) -> None:
        """Watch the inputs of a pass after ``step`` steps if the loop was read before, for ranks; takes some 0.1 ms."""
        if self._several and self._known and self._inputs is None and self._take_up(script_frames(sys._getframe())):
            self.step_is_over(step)  # what was set between two loops has changed since the last step, too

    def _take_up(self, frames: list[FrameType]) -> bool:
        """Take what was read of the loop in ``frames`` before; whether there is any."""
        known = self._known.get(tuple(frame.f_code for frame in frames))
        if known is not None:
            self._inputs = known.rebound(lambda owner: frames[owner.number] if type(owner) is _Function else owner)
            self._begin(frames)
        return known is not None

    def _begin(self, frames: list[FrameType]) -> None:
        self._frames = frames
        if self._inputs is not None:
            self._began = {**self._inputs.held_of_bodies(), **self._began}
            if self._several:
                self._watch(self._inputs)

    def body_begins(self, frame: FrameType) -> None:
        """Look at what the script holds before a body, unless that is done for the loop around ``frame``."""
        loop = _loop_around(frame)
        if loop not in self._told_read:
            self._told_read.add(loop)
            self._before_body, self._changes = (loop, self._look(frame)), None

    def body_ended(self, frame: FrameType) -> None:
        """Say which value that the script tells a reader is of this rank's own bodies, if `body_begins` has looked."""
        self._say_what_changed(frame, of_evaluation=False)
        self._before_body = None

    def evaluated(self, frame: FrameType, *, all_bodies: bool) -> None:
        """The same after the first body of an evaluation and after all bodies, with the training as a reader, too."""
        self._say_what_changed(frame, of_evaluation=True)
        if all_bodies:
            self._before_body = None

    def _say_what_changed(self, frame: FrameType, *, of_evaluation: bool) -> None:
        if self._before_body is None:
            return
        loop, before = self._before_body
        if loop != _loop_around(frame):
            return  # that loop was left before
        changes = changed(before, self._look(frame))
        if changes != self._changes:  # after all bodies often those of the first one
            self._changes = changes
            self._say_part(part_told(frame, self._state, changes, self._say, of_evaluation=of_evaluation))

    def _say_part(self, part: str) -> None:
        if part:
            self._say_once(
                f"{part}: {OWN_MICRO_BATCHES}, fewer where there are more ranks. Bring the parts of "
                "all ranks together after the loop, numbers by run.sum(...) and lists by run.gather(...), or give "
                "run.measure(...) the values in the loop; "
                "`local` in a name says that a value is one rank's own"
            )

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _look(self, frame: FrameType) -> Mapping[str, Mark]:
        return look(script_roots(frame), skip={id(one) for one in (*self._state.models, *self._state.optimizers)})

    def asked_at(self, place: str) -> str | None:
        """What the training computes from a call of `Run` at ``place``, a file and line; "" for nothing.

        None where the training has not been read yet.
        """
        read = [one for one in (self._inputs, *self._known.values()) if one is not None]
        return next((one.asked[place] for one in read if place in one.asked), "" if read else None)

    def held(self) -> Held:
        """The values of the inputs now, in a body."""
        return {} if self._inputs is None else self._inputs.held()

    @property
    def carried(self) -> str:
        """The first input that the body computes from its earlier value, in words; "" for none."""
        return "" if self._inputs is None else self._inputs.carried

    def changed_in_pass(self) -> str:
        """The first input that bodies have changed since the loop was read, in words; "" for none."""
        if self._inputs is None:
            return ""
        return changed_since(self._began, self._inputs.held_of_bodies(), "was changed by bodies of this pass")

    def body_is_over(self, before: Held, after: Held, where: tuple[int, int]) -> None:
        """Note inputs that differ between the two as set by a body, of the micro-batch at ``where`` (step, place)."""
        self._moved.update(name for name, (mark, _) in after.items() if name in before and before[name][0] != mark)
        if self._several and self._inputs is not None:
            for name, (mark, _) in self._inputs.items_of(after).items():
                known = self._items.setdefault(name, _Item(mark, where))
                if known.mark != mark:
                    self._items[name] = _Item(mark, where)
                elif known.where != where:
                    self._items[name] = _Item(mark, where, stays=True)

    def step_is_over(self, step: int) -> None:
        """Note numbers and texts among the inputs that have changed since the last step. Takes some microseconds."""
        for place, what, value in values_at(self._watched):
            name = place.text
            if type(value) in PLAIN and value != self._newest.setdefault(name, value):
                self._newest[name] = value
                _, before = self._histories.get(name, ("", 0))
                self._histories[name] = what, zlib.crc32(repr((step, value)).encode(), before)

    def between_bodies(self) -> dict[str, Since]:
        """The inputs between two bodies, or as the last loop was left; by their names in a message."""
        return self._left if self._inputs is None else self._since(self._inputs)

    def ranks_are_equal(self) -> None:
        """Note changes from here on only, since all ranks have compared the changes so far."""
        self._histories.clear()
        self._partly.clear()
        self._left = {name: since for name, since in self._left.items() if since.first != _CHANGES}

    def leave(self) -> None:
        """Note the inputs as the loop is left, without keeping its functions' variables alive."""
        if self._inputs is not None:
            self._left = self._since(self._inputs)
            functions = {id(each): _Function(number, each.f_code) for number, each in enumerate(self._frames)}
            codes = tuple(frame.f_code for frame in self._frames)
            self._known[codes] = self._inputs.rebound(lambda owner: functions.get(id(owner), owner))
        self._inputs, self._frames, self._watched, self._began, self._before_body = None, [], [], {}, None
        self.calls.forget()

    def _note_first(self, inputs: TrainingInputs) -> None:
        if not self._several:
            return
        for name, (mark, _) in (*inputs.held_between().items(), *inputs.held_when_needed().items()):
            self._first.setdefault(name, mark)

    def _watch(self, inputs: TrainingInputs) -> None:
        """Watch the numbers and texts of a loop from now on, in the middle of a step."""
        before = {place.text for place, _ in self._watched}
        found = [each for each in values_at(inputs.may_change(ChangedNames())) if type(each[2]) in PLAIN]
        self._watched = [(place, what) for place, what, _ in found]
        values = {place.text: value for place, _, value in found}
        self._partly.update(before - values.keys(), values.keys() - self._newest.keys())
        self._newest.update({**values, **self._newest})

    def _since(self, inputs: TrainingInputs) -> dict[str, Since]:
        if not self._several:
            return {}
        between, when_needed = inputs.held_between(), inputs.held_when_needed()
        stay = {
            f"{name}, which a body has made once and {what} is computed from,": Since(_STAYS, mark)
            for name, (mark, what) in (inputs.items_of(inputs.held()) if self._items else {}).items()
            if (known := self._items.get(name)) and known.stays and known.mark == mark and _tells(mark)
        }
        moving = {
            # Of what is made when it is needed, ranks may have other sizes, as of a mask; those of one size are equal.
            f"{name}{size_of(mark) if name in when_needed else ''}, which {what} is computed from,": Since(
                self._first[name], mark
            )
            for name, (mark, what) in inputs.themselves({**between, **when_needed}).items()
            if name in self._first and name not in self._moved and mark.kind not in CACHES
        }
        were = {
            f"{name}, which {what} is computed from, in earlier steps": Since(_CHANGES, Mark(1, "", history))
            for name, (what, history) in self._histories.items()
            if name in self._first and name not in self._moved and name not in self._partly
        }
        return moving | stay | were
