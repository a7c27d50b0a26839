"""The start of training: all objects are registered by then, so that a checkpoint can be loaded."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Final

from lockstep.checkpoint import Checkpoints, SavedTree, StateTree
from lockstep.errors import CheckpointError, UsageError
from lockstep.formatting import some_of
from lockstep.launch_contract import FRESH, RESUME, RESUME_FROM, SAVE_ONLY
from lockstep.run.checks.script_options import ScriptOptions
from lockstep.run.inputs.training_inputs import require_no_ranks
from lockstep.run.metrics.run_log import RunLog
from lockstep.run.proofs.resume_proof import ResumeProof
from lockstep.run.recovery.newest_state import LeftBehind
from lockstep.run.setup.identity import compare_devices, compare_ranks, device_of_bits
from lockstep.run.setup.run_context import RunContext
from lockstep.run.state.snapshot import RunSnapshot
from lockstep.trial_contract import CHECKPOINTS, CurrentTrial, current_trial, directory_of_run


class TrainingStart:
    """Compares the ranks' scripts, resumes from a checkpoint, and begins to listen to signals; once in a run."""

    def __init__(
        self,
        context: RunContext,
        snapshot: RunSnapshot,
        log: RunLog,
        proof: ResumeProof,
    ) -> None:
        self._context: Final = context
        self._state: Final = context.state
        self._snapshot: Final = snapshot
        self._position: Final = context.position
        self._identity: Final = context.identity
        self._log: Final = log
        self._proof: Final = proof
        self._save_stop: Final = context.save_stop
        self._tree_within_turn: StateTree | None = None  # of a checkpoint, until the open pass goes on
        self._options: ScriptOptions | None = None
        self._left_tree: StateTree | None = None  # the state that survivors have left, if the run resumes from it
        self.done = False
        self.closed = False  #: whether the run is
        self.stopped = False  #: whether the run was only to save the state that survivors have left
        self.resumed_at_end = False  #: whether the resumed pass had no micro-batch left, and no other pass has begun

    @property
    def resumes_within_turn(self) -> bool:
        """Whether the script repeats the part of its outer loop's turn before the pass that goes on."""
        return self._tree_within_turn is not None

    def refuse_late(self, method: str) -> None:
        """Check that the training has not started; the script calls ``method``.

        Raises:
            UsageError: if it has, or the run is closed.
        """
        self.refuse_closed()
        if self.done:
            raise UsageError(f"run.{method}(...) after the training began: call it before run.epochs(...)")

    def refuse_closed(self) -> None:
        """Check that the run is open.

        Raises:
            UsageError: if the run is closed.
        """
        if self.closed:
            raise UsageError(
                "this run is closed, by run.close(), the end of its `with` statement or the next Run(...), since "
                "a process has one run at a time: train, evaluate and log before"
            )

    def begin(self) -> None:
        """Start the training, unless that is done. Collective.

        Raises:
            UsageError: if the run is closed.
        """
        self.refuse_closed()
        if self.done:
            return
        if not self._state.models:
            raise UsageError("no model yet: call `model = run.model(model)` before the loop")
        self.done = True
        self._state.require_same_dtypes()
        self._state.note_attributes(self._context.device)
        self._state.look_for_schedulers(sys._getframe())
        require_no_ranks(self._context.inputs.read_script(sys._getframe()), self._context.reporter.say)
        self._context.kernels.begin()
        self._identity.note_script(self._state.optimizers, self._state.models)
        self._options = ScriptOptions(self._state)
        compare_ranks(self._context.group, self._identity.script)
        if self._context.settings.reduction == "exact":
            compare_devices(self._context.group, device_of_bits(self._context.device, os.environ))
        left = self._resume()
        self._log.open(self._position.progress.step)
        if left is not None:
            self._log_what_may_be_missing(left)
        self._context.reporter.unprotected = self._context.emergency.protect()
        self._context.leaves.open()
        if self._context.directory and (why := os.environ.get(SAVE_ONLY)):
            self._leave_saved(left, why)
        if self._context.directory:
            # Not earlier: while there is nothing to save, signals act as they do without Lockstep.
            if threading.current_thread() is threading.main_thread():
                self._context.stop_requests.listen()
            self._save_stop.open()

    def _leave_saved(self, left: LeftBehind | None, why: str) -> None:
        """Save the state that survivors have ``left`` as a checkpoint, and end the run. Collective.

        Raises:
            SystemExit: with code 75, once the checkpoint is committed.
            CheckpointError: if the state could not be saved.
        """
        context, step, tree = self._context, self._position.progress.step, self._left_tree
        if left is not None and tree is not None:
            context.checkpointer.save(lambda: tree, step, left.about, again=False, protect=self._position.best.step)
            if left.script is not None:
                context.checkpointer.note_next_step(step, left.script)

        def leave() -> None:
            position, committed = self._position, context.checkpointer.committed_step
            context.reporter.show("stopped", position.progress, position.length, position.loss, committed)
            self._save_stop.final_barrier()

        self.stopped = True
        context.checkpointer.stop(step, why, leave)

    def finish_resume(self) -> bool:
        """Restore the checkpoint again as the open pass goes on, which undoes changes by the repeated part of the turn.

        Returns:
            Whether the pass had been left by ``break`` when the checkpoint was saved.
        """
        tree, self._tree_within_turn = self._tree_within_turn, None
        if tree is None:
            return False
        self._restore(tree)
        self._snapshot.restore_evaluations(tree)
        return self._position.step_end.is_left

    def require_resumed(self) -> None:
        """Check that the script has reached the pass in which the checkpoint was taken.

        Raises:
            CheckpointError: if the turn of the outer loop is over and the script has not reached this pass.
        """
        if self.resumes_within_turn:
            raise CheckpointError(
                f"the checkpoint of step {self._position.progress.step} was taken in a loop over run.train(...) that "
                "this script did not come to again: it has other loops, or their order depends on what is in no "
                "checkpoint. Use the previous script, run.keep(...) what decides, or start over with --fresh"
            )

    def _log_what_may_be_missing(self, left: LeftBehind) -> None:
        """Log the rows that a dead leader may not have written, though other ranks took them for logged. Collective."""
        if not left.turn:
            self._log.write_recent()
            if self._tree_within_turn is not None:
                metrics = self._context.metrics
                if not metrics.recent.own():
                    self._tree_within_turn["recent"] = {}
                self._tree_within_turn["norms"]["are_logged"] = metrics.norms_state()["are_logged"]
        for step, epoch, values in left.rows:
            self._log.write(dict(values), step, epoch)

    def _resume(self) -> LeftBehind | None:
        """Resume from a checkpoint, or from the state that survivors have left, which is then returned."""
        checkpointer = self._context.checkpointer
        trial = current_trial()
        # A trial goes on from its own checkpoint, whichever worker restarts the trial.
        restarted = self._context.world.generation > 0 or trial is not None
        # Our launcher sets the variable once; other launchers leave it set for the generations after a failure.
        once = self._context.world.run_dir is not None or not restarted
        back_to = os.environ.get(RESUME_FROM) if once and trial is None else None
        left = self._context.emergency.find() if restarted and not back_to else None
        tree = checkpointer.resume(
            asked=restarted or os.environ.get(RESUME) == "1" or back_to is not None,
            fresh=os.environ.get(FRESH) == "1" and not restarted,
            back_to=back_to,
            left=left,
        )
        if tree is None:
            if trial is not None and trial.inherits is not None:
                self._inherit(trial, trial.inherits)
            return None
        checkpointer.compare(self._identity.script, within_pass=())
        self._proof.resumed(left.script if left is not None and checkpointer.resumed_from is left else None)
        changed, options = self._restore(tree)
        for text in options:
            self._context.reporter.say(text)
        if changed:
            self._context.reporter.say(
                f"{some_of(changed, 3)} "
                "learned or was in training mode, or not, when the checkpoint was saved, and the script has it "
                "otherwise: the checkpoint holds"
            )
        self._tree_within_turn = tree if self._snapshot.restore_position(tree) else None
        if left is None or checkpointer.resumed_from is not left:
            return None
        self._left_tree = tree if os.environ.get(SAVE_ONLY) else None
        return left

    def _restore(self, tree: SavedTree) -> tuple[list[str], list[str]]:
        """Restore a checkpoint, with the script's optimizer options if ``resume_options`` says so. Collective.

        Returns:
            See `RunSnapshot.restore`, and texts about options.
        """
        changed = self._snapshot.restore(tree)
        assert self._options is not None, "the training has begun"
        began = (self._context.checkpointer.resumed or self._identity.script)["optimizers"]
        script_holds = self._context.settings.resume_options == "script"
        self._identity.script["optimizers"], said = self._options.settle(began, script_holds=script_holds)
        return changed, list(dict.fromkeys(said))

    def _inherit(self, trial: CurrentTrial, parent: Path) -> None:
        """Load the initial weights from the corresponding run of another trial, whose directory is ``parent``."""
        context = self._context
        directory = directory_of_run(parent, len(trial.reports_of_runs) - 1)
        others = Checkpoints(directory / CHECKPOINTS, context.group, keep=1, say=context.reporter.say)
        saved = others.newest()
        if saved is None:
            raise CheckpointError(f"{directory} holds no whole checkpoint, whose weights this trial is to begin with")
        self._state.load_models(others.load(saved), context.strategy)
        context.reporter.say(f"begins with the weights of {saved.path}")
