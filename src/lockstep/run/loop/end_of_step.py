"""The end of a step, after the body of the loop: ranks are compared, and decisions to save or stop carried out.

the body    ... run.step(loss) makes the step       counted at once, as `Run.progress` says
            the rest of the body
its end     [checks of the GPU's flags, save/stop agreement, comparison of ranks, checkpoint, stop]

Where the loop is left by ``break``, the step's end comes at the next pass, or when the outer loop's turn is over: a
resumed script repeats the turn, and cannot be brought to a place behind a break.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from lockstep.checkpoint import StateTree
from lockstep.errors import LockstepError
from lockstep.report import State as DisplayState
from lockstep.run.batches.loaders import Loaders
from lockstep.run.benchmark.idle_devices import open_idle_devices
from lockstep.run.benchmark.measurement import Measurement
from lockstep.run.checks.nonfinite import NonFiniteChecks
from lockstep.run.metrics.run_log import LoggedRow, RunLog
from lockstep.run.proofs.resume_proof import ResumeProof
from lockstep.run.recovery.resume_point import ResumePoint
from lockstep.run.setup.run_context import RunContext
from lockstep.run.state.snapshot import RunSnapshot
from lockstep.run.stopping.save_stop import Decision
from lockstep.strategies import ServerStrategy

#: Steps of this process after which every rank has ended a step: if a rank is lost then, the others have a state to
#: leave.
_SAFE_STEPS: Final = 2
#: Turns of the outer loop after which ranks compare what they have logged; later only now and then.
_COMPARED_TURNS: Final = 2


class EndOfStep:
    """Counts the steps, and does the work at each step's end: comparing ranks, saving, stopping."""

    def __init__(
        self,
        context: RunContext,
        snapshot: RunSnapshot,
        loaders: Loaders,
        finite: NonFiniteChecks,
        log: RunLog,
        point: ResumePoint,
        proof: ResumeProof,
        measurement: Measurement | None = None,
    ) -> None:
        self._context: Final = context
        self._settings: Final = context.settings
        self.point: Final = point
        self.proof: Final = proof
        self._snapshot: Final = snapshot
        self.compare_ranks: Final = snapshot.compare_ranks  #: see `RunSnapshot.compare_ranks`
        self._position: Final = context.position
        self._identity: Final = context.identity
        self._loaders: Final = loaders
        self._finite: Final = finite
        self._log: Final = log
        self._measurement: Final = measurement
        self._idle_devices: Final = open_idle_devices(context)
        self._save_stop: Final = context.save_stop
        self._turns = 0  # of the outer loop, in this process
        self._rows: Sequence[LoggedRow] = ()  # logged before the resume point, maybe not by a leader that died
        self._save_again = False  # whether the state has changed since the last step was saved
        self.error: LockstepError | None = None  #: from where a loop was left by `break`, raised at the step's end
        self.steps = 0  #: done by this process
        self._steps_before_pass = 0  # done when the pass that is open, or was left by `break`, began
        self.stopped = False  #: whether the run was asked to stop, and has

    def count(self, samples: int) -> None:
        """Count a step of ``samples``, once; the step's end comes when the body of the loop is over."""
        if self._position.step_end.is_to_come:
            return
        self._position.note("made")
        self._position.progress = self._position.progress.after_step(samples)
        self._position.passes.after_step()
        self.steps += 1
        self._position.evaluations = self._position.evaluations_done = 0
        self._context.metrics.step_is_done()
        self.proof.step_is_done()
        # In the rest of the body, ranks are at different micro-batches, and must draw equal random numbers.
        self._position.seed_script("body")
        self._context.marker.set_step(self._position.progress.step)

    @property
    def waits(self) -> bool:
        """Whether decisions to save and to stop must wait: a step has not ended, or its loop was left by ``break``."""
        step_end = self._position.step_end
        return step_end.is_to_come or (step_end.is_left and not isinstance(self._context.strategy, ServerStrategy))

    def finish(self, rows: Sequence[LoggedRow] = ()) -> None:
        """End the last step, now that the body in which the step was done is over. Collective.

        To be called where a resume can go on. ``rows`` have been logged since the step, by a script that goes on.
        """
        self._raise_error()
        before, step = self._position.step_end, self._position.progress.step
        self._position.note("ended")
        if not before.is_to_come:
            if self._save_again:
                self.save()
            return
        if not before.is_compared:
            self._finite.step_ended()
        self._context.metrics.step_is_done()  # for values measured in the rest of the body
        self._context.emergency.note_late(step)
        self._context.inputs.step_is_over(step)
        self._log.forget_rows()
        self._rows = rows
        self.point.reach()
        if self._mirrors:
            buffers = (buffer for _, buffer in self._context.state.buffers)
            self._context.emergency.mirror(self._snapshot.take_own, self.about_left, buffers)
        # Only now that the step is safe, since a rank may be gone.
        self.proof.body_is_over(partial(self._snapshot.compare_ranks, looked_at=False))
        if self.steps == _SAFE_STEPS:
            self._context.emergency.forget_before()
        self._log.write_recent()  # before the save: a resumed run has logged these
        decision = self._save_stop.after_step(step)
        if not before.is_compared and self._compares and not decision.saves:
            self._snapshot.compare_ranks()
        self.carry_out(decision)
        position = self._position
        is_shown = self._context.reporter.step(
            position.progress, position.length, position.loss, self._context.checkpointer.committed_step
        )
        if is_shown and self._idle_devices is not None:
            self._idle_devices.look()
        self.begin_next()

    def finish_turn(self) -> None:
        """End a turn of the outer loop, and a step in it that was left by ``break``. Collective."""
        # A step that was left by `break` ends here, which forgets the rows logged since: these rows belong to the turn.
        step = self._position.progress.step if self._position.step_end.is_to_come else None
        before = [row for row in self._log.rows if row[0] == step]
        self.finish(before)
        if self._turns < _COMPARED_TURNS or self._is_check_due:
            self._log.compare_given()
        self._turns += 1
        self.point.begin_turn()
        self._rows = [*before, *self._log.rows]
        self._say_missing_best(None)

    def begin_next(self, *, begins_pass: bool = False) -> None:
        """Begin the next step, for a benchmark or profiler that records steps.

        Raises:
            SystemExit: with code 0, after the last step to be measured.
        """
        if begins_pass:
            self._steps_before_pass = self.steps
        if self._measurement is not None:
            # First, so that writing a trace is not part of a measured step.
            self._measurement.at(self._position.progress, begins_pass=begins_pass)
        if self._context.profiler is not None:
            self._context.profiler.at(self._position.progress.step)

    def finish_left(self) -> None:
        """Do a part of the step's end after a ``break``, where a resume could not go on yet. Collective.

        A resumed script repeats a turn of its outer loop, and cannot know that the break was passed: so decisions to
        save or stop wait for the next pass, or for the end of the turn. Where ranks serve others, the whole step ends
        now, since servers learn of a break only after they have ended the step.
        """
        step_end = self._position.step_end
        if not step_end.is_left or isinstance(self._context.strategy, ServerStrategy):
            self.finish()
            return
        self._raise_error()
        if step_end.is_to_come and not step_end.is_compared:
            self._position.note("compared")
            self._finite.step_ended()
            if self._compares:
                self._snapshot.compare_ranks()

    def save_if_best(self) -> None:
        """Save a checkpoint to be kept if the metric that the run is judged by has a new best value. Collective.

        The checkpoint is saved now, or at the step's end if that is still to come.
        """
        if self._position.note_best():
            self._save_again = True
            if not self.waits:
                self.save()
        self._say_missing_best(self._position.progress.step)

    def note_end(self) -> None:
        """Have the last step saved again, so that the checkpoint says that early stopping has ended the training."""
        self._save_again = True

    def finish_last(self) -> None:
        """End the last step of the training; save the step, or without a directory compare ranks. Collective."""
        self.finish()
        self._log.compare_given()
        checkpointer, step = self._context.checkpointer, self._position.progress.step
        # Later changes by the script, such as loading the best weights, must be in the last checkpoint.
        if checkpointer.saved_step == step and self._snapshot.changed_since_taken():
            self._save_again = True
        self.save()
        if not self._context.directory:
            self._snapshot.compare_ranks()
        self._context.warnings.say_all()
        self._say_missing_best(None, at_end=True)

    def _say_missing_best(self, step: int | None, *, at_end: bool = False) -> None:
        position = self._position
        if self._context.directory and (said := position.best.missing(position.metrics, step, at_end=at_end)):
            self._context.reporter.say(said)

    def carry_out(self, decision: Decision) -> None:
        """Save and stop, as all ranks have decided. Collective.

        Raises:
            SystemExit: with code 75, for a stop.
        """
        if decision.saves or self._save_again:
            self.save()
        if decision.stop:
            self.stopped = True
            try:
                self._context.checkpointer.stop(self._position.progress.step, decision.stop, self._leave_stopped)
            finally:
                if self._context.group.leads:
                    self._context.stop_requests.acknowledge()

    def save(self) -> None:
        """Begin to save the state after the last step, unless this state is saved already. Collective."""
        phase = self._context.marker.set_phase("save")
        self._finite.settle()
        self._context.warnings.say_all()
        again, self._save_again = self._save_again, False
        step = self._position.progress.step
        if self._context.checkpointer.save(
            self._snapshot.take, step, self._whole_identity(), again=again, protect=self._position.best.step
        ):
            self.proof.saved(step)
        self._save_stop.saved()
        self._context.reporter.unprotected = self._context.emergency.protect()
        self._context.marker.set_phase(phase)

    def compare_data(self, *, within_pass: Collection[str]) -> None:
        """Compare the identity of the data, now known, with that of the run that was resumed.

        Args:
            within_pass: the loaders in whose passes the run goes on.
        """
        self._context.checkpointer.compare(self._data_identity(), within_pass=within_pass)

    def show(self, state: DisplayState) -> None:
        """Show the user and the launcher the progress of the run."""
        position = self._position
        # While the run trains, a rank knows only its own losses without asking other ranks.
        loss = position.loss if state == "training" else position.metrics.get("loss", position.loss)
        self._context.reporter.show(
            state, position.progress, position.length, loss, self._context.checkpointer.committed_step
        )

    def _leave_stopped(self) -> None:
        self.show("stopped")
        self._save_stop.final_barrier()

    def note_modules(self) -> None:
        """See `RunSnapshot.note_modules`; called when a loop over micro-batches is left."""
        self._snapshot.note_modules()

    def about_left(self) -> StateTree:
        """The description of the state that this rank leaves, see `LeftState`."""
        group = self._context.group
        return {
            "step": self._position.progress.step,
            "turn": self.point.is_turn,
            "rank": group.rank,
            "ranks": group.size,
            "identity": self._whole_identity(),
            "rows": list(self._rows),
        }

    def _whole_identity(self) -> StateTree:
        return self._identity.script | self._data_identity() | {"contents": self._loaders.contents}

    def _data_identity(self) -> StateTree:
        plan = self._context.plan
        return self._identity.data(plan.sizes, plan.samples, self._loaders.lengths, self._loaders.orders)

    @property
    def compares_next(self) -> bool:
        """Whether the bodies of the next step are compared: in the first two steps, and every ``check_every`` steps."""
        return self.steps < 2 or self._is_check_due

    @property
    def _mirrors(self) -> bool:
        """Whether each rank copies its part of the state into memory: on request, or if survivors would lack state."""
        context = self._context
        return self._settings.mirror or context.state.with_closure or context.carried.is_used

    @property
    def _compares(self) -> bool:
        """Whether ranks compare their states after the step just made: the same answer on all ranks."""
        return self.steps == self._steps_before_pass + 1 or self._is_check_due

    @property
    def _is_check_due(self) -> bool:
        return self.steps % self._settings.check_every == 0

    def _raise_error(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error
        self._context.leaves.agree()
