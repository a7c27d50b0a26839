"""The checkpoints of a run: resume, save, and stop with a checkpoint; or nothing, for a run without a directory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final, NoReturn

from typing_extensions import override

from lockstep.checkpoint import Checkpoints, Outcome, Saved, SavedTree, StateTree
from lockstep.errors import CheckpointError, SettingError
from lockstep.launch_contract import EXIT_NOT_SAVED, EXIT_STOPPED, FRESH, RESUME, RESUME_FROM, RUN_DIR
from lockstep.run.recovery.newest_state import LeftBehind
from lockstep.run.setup.identity import differences
from lockstep.run.stopping.stop_requests import JobDeadline

Say = Callable[[str], None]
Identity = SavedTree
"""The parts of a run's identity, by name."""


class RunCheckpointer:
    """The checkpoints of a run. This class saves nothing, and `DirectoryCheckpointer` overrides all its methods.

    All ranks make the same calls in the same order.
    """

    saved_step: int | None = None  #: step of the last save that was begun or resumed from
    resumed_from: LeftBehind | None = None  #: the state that survivors have left, if resumed from
    resumed: Identity | None = None  #: of the resumed run, as saved; None: the run was not resumed

    @property
    def differs(self) -> bool:
        """Whether a difference from the run that was resumed has been reported."""
        return False

    def resume(
        self, *, asked: bool, fresh: bool, back_to: str | None = None, left: LeftBehind | None = None
    ) -> StateTree | None:
        """The state of the newest whole checkpoint; None: training begins at the first step, as with ``fresh``.

        With ``back_to``, a step or ``best``, the state of this step or of the best step; later checkpoints are set
        aside. The state that survivors of a dead rank have ``left`` is taken if it is newer.
        """
        return None

    def compare(self, identity: Identity, *, within_pass: Collection[str]) -> None:
        """Report or refuse differences from the run that was resumed, in the parts that ``identity`` names."""

    def save(
        self, tree: Callable[[], StateTree], step: int, identity: Identity, *, again: bool, protect: int | None
    ) -> bool:
        """Begin to save ``tree()`` as the state after ``step``, unless ``step`` is saved and ``again`` is false.

        Once committed, the checkpoint of step ``protect`` is kept in addition to those kept anyway, and the checkpoint
        protected before is not.

        Returns:
            Whether a save was begun.
        """
        return False

    def before_commit(self, flush: Callable[[], object]) -> None:
        """The leader calls ``flush`` in the thread of each save from now on, before the checkpoint becomes visible."""

    def note_next_step(self, step: int, content: Mapping[str, object]) -> None:
        """Write the record of the next step beside the checkpoint of ``step``; see `Checkpoints.note_next_step`."""

    def next_step(self) -> tuple[Path, dict[str, object] | None]:
        """The path and content of the record of the step after the resumed checkpoint; None: no record. Collective."""
        return Path(), None

    def committed_step(self) -> int | None:
        """The newest step in a committed checkpoint. Cheap enough to be called in every step."""
        return None

    def protect_newest(self) -> None:
        """Keep the newest checkpoint, and a checkpoint being written, in addition to those kept anyway. Cheap."""

    def stop(self, step: int, reason: str, leave_together: Callable[[], None]) -> None:
        """Leave the process with code 75, now that the state after ``step`` is being saved.

        ``leave_together`` is called when the save has ended, and returns once all ranks have called it.
        """

    def leave_stopped(self, step: int, reason: str) -> NoReturn:
        """Leave the process with code 75, since the last ``step`` is saved; the leader says so. Not collective."""
        raise AssertionError("no step is saved")

    def close(self) -> None:
        """Wait for the end of the last save."""

    def has(self, step: int) -> bool:
        """Whether ``step``, after which the run ends, is saved, or no saves were asked for; called after `close`."""
        return True

    def leave_without(self, step: int) -> NoReturn:
        """Leave the process with code 74, because ``step`` is in no checkpoint."""
        raise AssertionError("nothing was to be saved")

    def go_back(self, step: int) -> None:
        """Set aside checkpoints after ``step``, which may be wrong, so that no resume uses them. Collective."""

    def abandon(self) -> None:
        """A rank failed: stop waiting for parts of other ranks. Not collective."""

    def release(self) -> None:
        """Free the directory for another run; the last call. Not collective."""


class DirectoryCheckpointer(RunCheckpointer):
    """For a run with a directory."""

    def __init__(self, checkpoints: Checkpoints, say: Say, end: JobDeadline) -> None:
        self._checkpoints: Final = checkpoints
        self._say: Final = say
        self._end: Final = end  # is told the duration of each save
        self._began_s: float | None = None  # the save whose end was not seen yet
        self.resumed: Identity | None = None
        self._said: set[str] = set()  # texts of differences from `resumed`
        self._ended: Outcome | None = None  # how the last save ended
        self.saved_step: int | None = None
        self.resumed_from: LeftBehind | None = None
        self._resumed_at: Saved | None = None  # the resumed checkpoint; None: another state

    def resume(
        self, *, asked: bool, fresh: bool, back_to: str | None = None, left: LeftBehind | None = None
    ) -> StateTree | None:
        """See `RunCheckpointer.resume`. With ``fresh``, earlier checkpoints are set aside and kept.

        Raises:
            SettingError: if there is a checkpoint and no resume was asked for: to go on or to start over is the user's
                choice. Also for a ``back_to`` without a checkpoint.
        """
        if fresh and (aside := self._checkpoints.archive()) is not None:
            self._say(f"starting over; the earlier checkpoints are in {aside}")
        saved = self._checkpoints.newest()
        if saved is not None and back_to is not None:
            saved = self._back_to(back_to, saved)
        if (
            left is not None
            and (saved is None or left.step > saved.step)
            and (survived := left.load()) is not None
            and not self._lacks_best(survived)
        ):
            self.resumed, self.resumed_from = left.about, left
            self._say(f"goes on from step {left.step} ({left.origin})")
            return survived
        if saved is None:
            if asked:
                self._say(f"no checkpoint in {self._checkpoints.root}: training begins at the first step")
            return None
        if not asked:
            script = Path(sys.argv[0]).name or "train.py"
            raise SettingError(
                f"{self._checkpoints.root} holds a run that got to step {saved.step}. To continue it: "
                f"lockstep run --resume ... {script}, or {RESUME}=1 python {script}. "
                f"To start over: lockstep run --fresh ..., {FRESH}=1 python {script}, or another directory"
            )
        tree: StateTree = self._checkpoints.load(saved)
        self.resumed, self._resumed_at, self.saved_step = saved.about, saved, saved.step
        self._say(f"resumed at step {saved.step} from {saved.path}")
        return tree

    def _lacks_best(self, tree: StateTree) -> bool:
        """Whether the best step's checkpoint is missing, since a rank died during its save.

        Collective.
        """
        best = tree["best"]
        if best is None or best["step"] in self._checkpoints.steps():
            return False
        self._say(f"the step that survivors saved is not used: the best step, {best['step']}, was not saved yet")
        return True

    def _back_to(self, wanted: str, newest: Saved) -> Saved | None:
        best = self._checkpoints.load(newest).get("best") if wanted == "best" else None
        step = best["step"] if best else int(wanted) if wanted.isdecimal() else None
        there = self._checkpoints.steps()
        if step not in there:
            what = "it has no best one: give Run(best='max accuracy'), or" if wanted == "best" and not best else "give"
            option = f"--resume-from {wanted}" if RUN_DIR in os.environ else f"{RESUME_FROM}={wanted}"
            raise SettingError(
                f"{option}: {self._checkpoints.root} has checkpoints of steps "
                f"{', '.join(map(str, there))}; {what} one of these"
            )
        if (aside := self._checkpoints.archive(after=step)) is not None:
            self._say(f"going back to step {step}; later checkpoints are in {aside}")
        return self._checkpoints.newest()

    def compare(self, identity: Identity, *, within_pass: Collection[str]) -> None:
        """See `RunCheckpointer.compare`.

        Raises:
            CheckpointError: if steps would hold other samples than in the run that saved, or an optimizer is of another
                class.
        """
        before = self.resumed or identity
        for name, (global_batch, micro_batch) in identity.get("sizes", {}).items():
            was_global, was_micro = before["sizes"].get(name, (global_batch, micro_batch))
            # A loader opened within the outer loop, named by +, may have other sizes in the next turn.
            if (was_global, was_micro) == (global_batch, micro_batch) or (
                name.startswith("+") and name not in within_pass
            ):
                continue
            raise CheckpointError(
                f"the checkpoint was trained with global_batch={was_global}, micro_batch={was_micro}, and this script "
                f"says {global_batch}, {micro_batch}: its steps would hold other samples. Give the previous sizes, or "
                "start over with --fresh"
            )
        for name in within_pass:
            samples = identity["samples"][name]
            was = before["samples"].get(name, samples)
            if was == samples:
                continue
            raise CheckpointError(
                f"the checkpoint was taken within an epoch of {was} samples, and this script's data set "
                f"has {samples}: what is left of the epoch would not be what was left then. Give the "
                "previous data set (of one that the script makes as it trains: run.keep(...) what that is made from, "
                "such as a list of indices), or start over with --fresh"
            )
        for number, (epoch, digest) in identity.get("orders", {}).items():
            was_epoch, was = before.get("orders", {}).get(number, (None, None))
            if was_epoch == epoch and was != digest:
                raise CheckpointError(
                    f"the checkpoint was taken within epoch {epoch}, whose order of samples has changed: what "
                    "is left of the epoch would not be what was left then. Keep what the sampler or order= depends on, "
                    "with run.keep(...), or start over with --fresh"
                )
        for text in differences(before, identity):
            if text not in self._said:
                self._say(text)
            self._said.add(text)

    @property
    def differs(self) -> bool:
        """Whether a change since the checkpoint on which bits depend has been reported."""
        return bool(self._said)

    @override
    def save(
        self, tree: Callable[[], StateTree], step: int, identity: Identity, *, again: bool, protect: int | None
    ) -> bool:
        begins = again or self.saved_step != step
        if begins:
            self._began_s = time.monotonic()
            self._checkpoints.save(tree(), step, identity, protect=protect)
            self.saved_step = step
        return begins

    @override
    def before_commit(self, flush: Callable[[], object]) -> None:
        """The leader calls ``flush`` in the thread of each save from now on, before the checkpoint becomes visible."""
        self._checkpoints.before_commit(flush)

    @override
    def note_next_step(self, step: int, content: Mapping[str, object]) -> None:
        self._checkpoints.note_next_step(step, content)

    @override
    def next_step(self) -> tuple[Path, dict[str, object] | None]:
        return (Path(), None) if self._resumed_at is None else self._checkpoints.next_step(self._resumed_at)

    @override
    def committed_step(self) -> int | None:
        self._checkpoints.finished_saves()
        if self._began_s is not None and self._checkpoints.last_committed_step == self.saved_step:
            self._end.save_s, self._began_s = time.monotonic() - self._began_s, None
        return self._checkpoints.last_committed_step

    @override
    def protect_newest(self) -> None:
        self._checkpoints.protect_newest()

    def stop(self, step: int, reason: str, leave_together: Callable[[], None]) -> None:
        """See `RunCheckpointer.stop`.

        Raises:
            SystemExit: with code 75, once the checkpoint is committed.
            CheckpointError: if the checkpoint could not be committed.
        """
        self._checkpoints.wait()
        leave_together()
        if self._checkpoints.last_committed_step != step:
            raise CheckpointError(f"stopped by {reason} at step {step}, and its checkpoint was not saved")
        self.leave_stopped(step, reason)

    @override
    def leave_stopped(self, step: int, reason: str) -> NoReturn:
        # A launcher prints the command itself, or resumes by itself.
        again = "" if RUN_DIR in os.environ else "; run it again with --resume to go on"
        self._say(f"stopped by {reason} at step {step}, which is saved{again}")
        raise SystemExit(EXIT_STOPPED)

    @override
    def close(self) -> None:
        self._ended = self._checkpoints.close()

    @override
    def has(self, step: int) -> bool:
        return self._checkpoints.last_committed_step == step

    def leave_without(self, step: int) -> NoReturn:
        """See `RunCheckpointer.leave_without`. The leader and a note on the exception say which step is missing.

        Raises:
            SystemExit: with code 74.
        """
        root, good = self._checkpoints.root, self._checkpoints.last_committed_step
        why_not = self._ended.why_not if self._ended else "no save was begun"
        rest = (
            "There is no checkpoint at all: mend that, or give another directory, and run it again"
            if good is None
            else f"The last good one is of step {good}: mend that, then run it again with --resume to go on from there"
        )
        missing = f"trained to step {step}, which no checkpoint in {root} holds: {why_not}. {rest}"
        self._say(f"NOT SAVED: {missing}")
        ending = SystemExit(EXIT_NOT_SAVED)
        ending.add_note(missing)
        raise ending

    @override
    def go_back(self, step: int) -> None:
        self._checkpoints.wait()
        there = self._checkpoints.steps()
        if there and min(there) > step:
            self._say(
                f"no checkpoint is left of step {step}, up to which audits have found nothing, or before: those of "
                f"steps {', '.join(map(str, sorted(there)))} may hold what was computed wrongly. Save at audited "
                "steps, or keep more"
            )
        elif there and (aside := self._checkpoints.archive(after=step)) is not None:
            self._say(f"checkpoints after step {step}, up to which audits have found nothing, are set aside in {aside}")

    @override
    def abandon(self) -> None:
        self._checkpoints.abandon()

    @override
    def release(self) -> None:
        self._checkpoints.release()
