"""The script's place in its passes over data sets: a resume needs this place to go on in the right pass.

    for epoch in run.epochs(2):             a turn of the outer loop
        for batch in run.train(a): ...      pass 0 over a, left by break after 3 steps
        for batch in run.evaluate(b): ...
        for batch in run.train(a): ...      the same pass, from its step 3 on
        for batch in run.train(c): ...      pass 0 over c
                                            killed here: {a: pass 0, step 5; c: pass 0, step 2}, c is open

A resumed script repeats the turn from its beginning. Passes that were over give no micro-batches, and changes of state
between passes are undone when the script comes to the pass that was open.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType
from typing import Final, Literal

from lockstep.checkpoint import SavedTree, StateTree
from lockstep.data import ShardsFound
from lockstep.errors import UsageError
from lockstep.seeding import seed_of

OuterLoop = Literal["none", "epochs", "steps"]
_ORDERS: Final = 2**31  # numbers for orders of samples, which a data set's ``set_epoch`` may be given


@dataclass(slots=True)
class Cursor:
    """The place of a loader in its passes."""

    number: int = 0  #: of the pass over this loader, counted in this turn; in `Run.steps`, since `Run.steps` began
    step: int = 0  #: the next step of the pass
    complete: bool = False  #: whether the pass came to its end, so that the next call begins a new pass
    steps: int | None = None  #: of the whole pass; None: not known yet
    site: str = ""  #: where the script called `Run.train` for this pass last
    moved: bool = False  #: whether the pass began at another site, so that the site tells which loop goes on
    shards: ShardsFound = field(default_factory=dict)  #: what the pass has found of the shards of a stream


class Passes:
    """The passes of a run over its loaders, the same on all ranks. A loader's name is the same in a resumed run."""

    def __init__(self) -> None:
        self.loop: OuterLoop = "none"  #: that the script is in
        self.began = 0  #: steps of the run when the turn began
        self.until = 0  #: steps of the run when the turn ends, in `Run.steps`
        self.caller: CodeType | None = None  #: the function that called `Run.epochs` or `Run.steps`
        self._first_order = 0  # in `Run.steps`: epochs done before `Run.steps`
        self._open: tuple[str, ...] = ()  # loaders of the pass that was begun or continued last
        self._of_turn: dict[str, Cursor] = {}
        self._of_steps: dict[str, Cursor] = {}  # in `Run.steps`, where loaders go on from turn to turn
        self._repeated: dict[str, int] = {}  # passes of this turn that a resumed script has gone through, by loader

    def enter(self, loop: OuterLoop, epochs: int) -> None:
        """Begin an outer loop, after ``epochs`` epochs."""
        if loop == "steps" and not self._of_steps:
            self._first_order = epochs
        if loop != self.loop:
            self._of_turn = {}
        self.loop = loop

    def begin_turn(self, step: int) -> None:
        """Begin a turn of the outer loop after ``step`` steps. In `Run.steps` each loader continues its pass."""
        self.began, self._open = step, ()
        self._of_turn = {}
        for cursor in self._of_steps.values():
            cursor.site, cursor.moved = "", False

    def begin(self, names: Sequence[str], site: str, *, may_take_up: bool) -> None:
        """Begin a new pass, or continue a pass that was left, where the script calls `Run.train` at ``site``.

        Raises:
            UsageError: for a second pass outside of an outer loop, which a resume could not tell from the first, and
                for a pass that was left and cannot be continued.
        """
        cursors = [self._cursors.setdefault(name, Cursor()) for name in names]
        if self.loop == "none" and any(cursor.complete for cursor in cursors):
            raise UsageError(
                "a second run.train(...) outside of epochs: write `for epoch in run.epochs(n):` around it, or "
                "`for step in run.steps(n):`"
            )
        if not may_take_up and any(self._is_left(cursor) for cursor in cursors):
            raise UsageError(
                "run.train(...) again for a loop that was left by break: ranks that serve others cannot continue it; "
                "under this strategy give each part an epoch of its own, or use ddp or zero"
            )
        for cursor in cursors:
            if cursor.complete:
                cursor.number, cursor.step, cursor.complete = cursor.number + 1, 0, False
                cursor.steps, cursor.shards = None, {}
                cursor.site, cursor.moved = "", False
            cursor.moved |= cursor.site not in ("", site)
            cursor.site = site
        self._open = tuple(names)

    @property
    def open_pass(self) -> list[int | str]:
        """What tells the pass that was begun or continued last from all others of the run."""
        return [self.began, *self._open, *(self._cursors[name].number for name in self._open)]

    def _is_left(self, cursor: Cursor) -> bool:
        """Whether the pass was left by ``break`` in this turn; in `Run.steps`, passes go on in the next turn anyway."""
        return bool(cursor.step) and not cursor.complete and (self.loop != "steps" or cursor.site != "")

    def is_open(self, names: Sequence[str], site: str) -> bool:
        """Whether a resumed script's call of `Run.train` at ``site`` is the pass that goes on.

        To be asked once for each call: passes that were over are counted, up to the pass that was open.
        """
        cursor = self._cursors.get(names[0], Cursor())
        over = self.loop != "steps" and self._repeated.get(names[0], 0) < cursor.number
        if over or tuple(names) != self._open:
            self._repeated |= {name: self._repeated.get(name, 0) + 1 for name in names}
            return False
        if cursor.moved and cursor.site != site:
            return False
        self._repeated.clear()
        for name in names:
            self._cursors[name].complete = False
        return True

    def began_at(self, step: int) -> int:
        """The run's steps, of ``step`` done, when the open pass began; in `Run.steps`, when the turn began."""
        return self.began if self.loop == "steps" else step - self._cursors[self._open[0]].step

    def _order(self, number: int, epoch: int) -> int:
        if self.loop == "steps":
            return self._first_order + number
        return epoch if number == 0 else seed_of("pass", epoch, number) % _ORDERS

    def place(self, name: str, epoch: int) -> tuple[int, int, ShardsFound]:
        """The place of the loader's pass: the number of its order of samples, its next step, and the shards found.

        The loader adds the shards of a stream to the third value as it reads. ``epoch`` is the run's.
        """
        cursor = self._cursors[name]
        return self._order(cursor.number, epoch), cursor.step, cursor.shards

    def step(self, name: str) -> int:
        """The next step of the loader's pass."""
        return self._cursors[name].step

    def next(self, name: str, epoch: int) -> tuple[int, int]:
        """The order and the step at which a call of `Run.train` would begin; ``epoch`` is the run's."""
        cursor = self._cursors.get(name, Cursor())
        if cursor.complete:
            return self._order(cursor.number + 1, epoch), 0
        return self._order(cursor.number, epoch), cursor.step

    def note_steps(self, name: str, steps: int | None) -> None:
        """Note the number of ``steps`` of the loader's pass, which has begun; None: not known."""
        self._cursors[name].steps = steps

    def is_over(self, name: str) -> bool:
        """Whether all steps of the loader's pass are done; False if the pass's number of steps is not known."""
        cursor = self._cursors[name]
        return cursor.step == cursor.steps

    def after_step(self) -> None:
        """Count a step of the open pass."""
        for name in self._open:
            self._cursors[name].step += 1

    def next_pass(self, name: str) -> None:
        """Start the loader's next pass, in `Run.steps`, where the loader has come to its end."""
        cursor = self._cursors[name]
        cursor.number, cursor.step, cursor.steps, cursor.shards = cursor.number + 1, 0, None, {}

    def complete(self) -> None:
        """Note that the open pass came to its end; in `Run.steps` only the turn did, and loaders go on later."""
        if self.loop != "steps":
            for name in self._open:
                self._cursors[name].complete = True

    def as_dict(self) -> StateTree:
        """Plain values, for a checkpoint."""
        return {
            "loop": self.loop,
            "began": self.began,
            "first_order": self._first_order,
            "open": list(self._open),
            "of_turn": {name: asdict(cursor) for name, cursor in self._of_turn.items()},
            "of_steps": {name: asdict(cursor) for name, cursor in self._of_steps.items()},
        }

    def load(self, values: SavedTree) -> None:
        """Go on from `as_dict`."""
        self.loop, self.began, self._first_order = values["loop"], values["began"], values["first_order"]
        self._open = tuple(values["open"])
        self._of_turn = {name: Cursor(**cursor) for name, cursor in values["of_turn"].items()}
        self._of_steps = {name: Cursor(**cursor) for name, cursor in values["of_steps"].items()}
        self._repeated = {}

    @property
    def _cursors(self) -> dict[str, Cursor]:
        return self._of_steps if self.loop == "steps" else self._of_turn


def call_site(up_to: CodeType | None) -> str:
    """The script's line that calls the method of `Run` calling `call_site`, and its callers' lines up to ``up_to``."""
    lines = []
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        lines.append(f"{Path(frame.f_code.co_filename).name}:{line}")
        if frame.f_code is up_to:
            return " < ".join(lines)
    return lines[0]
