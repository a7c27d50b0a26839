"""The end of a step, once the body of the loop is over: ranks are compared, and decisions to save or stop carried out.

the body    ... run.step(loss) makes the step       counted at once, as `Run.progress` says
            the rest of the body
its end     [checks of the GPU's flags, save/stop agreement, comparison of ranks, checkpoint, stop]
"""

from __future__ import annotations

from typing import Any, Final

from lockstep.errors import LockstepError
from lockstep.report import State as DisplayState
from lockstep.run.loaders import Loaders
from lockstep.run.nonfinite import NonFiniteChecks, NonFiniteWarnings
from lockstep.run.run_log import RunLog
from lockstep.run.save_stop import Decision
from lockstep.run.setup import RunContext
from lockstep.run.snapshot import RunSnapshot


class EndOfStep:
    """Counts the steps, and does what belongs to their ends."""

    def __init__(
        self,
        context: RunContext,
        snapshot: RunSnapshot,
        loaders: Loaders,
        finite: NonFiniteChecks,
        warnings: NonFiniteWarnings,
        log: RunLog,
    ) -> None:
        self._context: Final = context
        self._snapshot: Final = snapshot
        self._position: Final = context.position
        self._identity: Final = context.identity
        self._loaders: Final = loaders
        self._finite: Final = finite
        self._warnings: Final = warnings
        self._log: Final = log
        self._save_stop: Final = context.save_stop
        self._open_step = 0  # a step that is done, and whose body has not ended; 0: none
        self.error: LockstepError | None = None  #: met where a loop was left by `break`, to be raised at the end
        self.steps = 0  #: done by this process
        self.stopped = False  #: whether the run was asked to stop, and has

    def count(self, samples: int) -> None:
        """A step of ``samples`` is done; its end comes when the body of the loop is over. Once for each step."""
        if self._open_step:
            return
        self._position.progress = self._position.progress.after_step(samples)
        self._open_step = self._position.progress.step
        self.steps += 1
        self._position.evaluations = 0
        self._context.metrics.step_is_done()
        # In what is left of the body ranks stand at different micro-batches, and are to draw alike.
        self._position.seed_script("body")
        self._context.marker.set_step(self._open_step)

    def finish(self, *, steps_before_pass: int | None = None) -> None:
        """The body in which a step was done is over: what belongs to the step's end comes now. Collective.

        Args:
            steps_before_pass: `steps` when the pass began; ranks are compared after its first one.
        """
        error, self.error = self.error, None
        if error is not None:
            raise error
        step, self._open_step = self._open_step, 0
        if not step:
            return
        self._finite.step_ended()
        self._log_recent(step)  # before it is saved: a run that goes on from here has logged it
        decision = self._save_stop.after_step(step)
        is_first = steps_before_pass is not None and self.steps == steps_before_pass + 1
        if (is_first or self.steps % self._context.settings.check_every == 0) and not decision.saves:
            self._snapshot.compare_ranks()
        self.carry_out(decision)
        position = self._position
        self._context.reporter.step(
            position.progress, position.length, position.loss, self._context.checkpointer.committed_step
        )

    def finish_last(self) -> None:
        """The training is over: the last step ends, and is saved or at least compared between ranks. Collective."""
        self.finish()
        self.save()
        if not self._context.directory:
            self._snapshot.compare_ranks()
        self.say_warnings()

    def carry_out(self, decision: Decision) -> None:
        """Save and stop, as all ranks have decided. Collective.

        Raises:
            SystemExit: with code 75, for a stop.
        """
        if decision.saves:
            self.save()
        if decision.stop:
            self.stopped = True
            try:
                self._context.checkpointer.stop(self._position.progress.step, decision.stop, self._leave_stopped)
            finally:
                if self._context.group.leads:
                    self._context.stop_requests.acknowledge()

    def save(self) -> None:
        """Begin to save the state after the last step, unless that is done. Collective."""
        phase = self._context.marker.set_phase("save")
        self._finite.settle()
        self.say_warnings()
        self._context.checkpointer.save(self._snapshot.take, self._position.progress.step, self._whole_identity())
        self._save_stop.saved()
        self._context.marker.set_phase(phase)

    def say_warnings(self) -> None:
        """The leader says what the other ranks have found. Collective."""
        if self._context.settings.on_nan == "warn":
            self._warnings.say_all()

    def compare_data(self) -> None:
        """What the bits depend on is compared with the run that was resumed, now that the data is known."""
        self._context.checkpointer.compare(self._data_identity(), mid_epoch=self._position.progress.epoch_step > 0)

    def show(self, state: DisplayState) -> None:
        """Tell the user and the launcher where the run is now."""
        position = self._position
        self._context.reporter.show(
            state, position.progress, position.length, position.loss, self._context.checkpointer.committed_step
        )

    def _log_recent(self, step: int) -> None:
        """After every so many steps, what they measured is logged. Collective then."""
        every, metrics = self._context.settings.log_every, self._context.metrics
        if every is None:
            return
        metrics.step_is_done()  # what the rest of the body has measured
        if step % int(every.every) == 0:
            means = {f"{name}_step": mean for name, mean in metrics.recent.reduce(self._context.group).items()}
            self._log.write({**means}, step, self._position.epoch_number)

    def _leave_stopped(self) -> None:
        self.show("stopped")
        self._save_stop.final_barrier()

    def _whole_identity(self) -> dict[str, Any]:
        return self._identity.script | self._data_identity()

    def _data_identity(self) -> dict[str, Any]:
        samples = self._position.length.samples_per_epoch
        return self._identity.data(self._context.plan.plan, samples, self._loaders.lengths, self._loaders.orders)
