"""The end of a run: the last step is saved, all parts are closed, and an error gets notes with advice."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

import torch
from torch import nn

from lockstep.error_advice import add_advice
from lockstep.errors import LockstepError, TrialStopped
from lockstep.peer_failure import is_peer_failure
from lockstep.run.batches.loaders import Loaders
from lockstep.run.benchmark.measurement import Measurement
from lockstep.run.checks.oom_advice import MemoryPeak, add_memory_advice, staying_bytes, wanted_bytes
from lockstep.run.loop.end_of_step import EndOfStep
from lockstep.run.loop.train_step import TrainStep
from lockstep.run.metrics.metric_means import explain_missing
from lockstep.run.metrics.run_log import RunLog
from lockstep.run.setup.resume import TrainingStart
from lockstep.run.setup.run_context import RunContext
from lockstep.script_end import forget

_RESUMED: Final = (
    "the run was resumed, and has made no step since: lists, counters and other variables of the script have begun "
    "anew, but for what run.keep(...) was given"
)
_RESUMED_AT_END: Final = (
    "this run has resumed at the end of a pass, from a checkpoint of its last step: the loop over run.train(...) had "
    "no micro-batch left, and variables of the script are what they were before the loop. The means of "
    "run.measure(...) are in run.metrics there, and objects given to run.keep(...) are restored"
)
#: Names of the functions that a call of a module goes through.
_CALLS = ("forward", "__call__", "_wrapped_call_impl", "_call_impl")
# torchrun looks for a failing rank's error here, and reports it as the root cause.
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class Shutdown:
    """Closes a run, at its normal end or after an error."""

    def __init__(
        self,
        context: RunContext,
        loaders: Loaders,
        start: TrainingStart,
        train_step: TrainStep,
        end_of_step: EndOfStep,
        log: RunLog,
        end_open_pass: Callable[[], None],
        measurement: Measurement | None = None,
    ) -> None:
        self._context: Final = context
        self._state: Final = context.state
        self._loaders: Final = loaders
        self._start: Final = start
        self._train_step: Final = train_step
        self._end_of_step: Final = end_of_step
        self._position: Final = context.position
        self._log: Final = log
        self._end_open_pass: Final = end_open_pass  # of a script that reads the pass by `next`
        self._save_stop: Final = context.save_stop
        self._measurement: Final = measurement
        self._closed = False
        self._process: Final = os.getpid()

    def close(self, error: BaseException | None) -> None:
        """See `Run.close` and `Run.__exit__`; does nothing in a process forked by the script, which is no rank."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        forget(self.close)
        context = self._context
        # sys.exit() without a complaint is an end like any other. At the end of a script, the SystemExit by which the
        # run was stopped is not known.
        ends_well = not (self._end_of_step.stopped or self._start.stopped) and (
            error is None or (isinstance(error, SystemExit) and not error.code)
        )
        try:
            if error is not None:
                self._leave_state(error)
            try:
                if error is None:
                    self._end_open_pass()
            finally:
                self._train_step.close()
                context.marker.set_phase("exit")
            if ends_well:
                context.leaves.agree()
                context.leaves.leave("ended the run", self._position.progress.step, error)
                context.leaves.agree()
                self._finish()
            else:
                context.checkpointer.abandon()
                self._report(error)
        finally:
            self._start.closed = True
            self._save_stop.close()
            context.leaves.close()
            context.stop_requests.unlisten()
            self._loaders.close()
            if self._measurement is not None:
                self._measurement.close()
            if self._train_step.transcript is not None:
                self._train_step.transcript.close()
            is_stopped = error is None or isinstance(error, SystemExit)
            self._log.close("ended" if ends_well else "stopped" if is_stopped else "failed")
            # After an error, a GPU may wait for a collective that never ends.
            waits = error is None or type(error) in (SystemExit, TrialStopped) or context.device.type == "cpu"
            if waits and context.profiler is not None:
                context.profiler.close(failed=error is not None)
            context.kernels.release()
            context.warnings.close()
            context.reporter.close()
            context.emergency.close()
            context.checkpointer.release()
            if waits:
                try:
                    context.strategy.close()
                finally:
                    context.group.close()
            context.marker.set_phase("script")
            context.marker.set_step(-1)

    def _leave_state(self, error: BaseException) -> None:
        """Leave this rank's state for the next generation, if another rank is gone."""
        if self._train_step.current is not None:
            self._train_step.leave()
        phase = self._context.marker.set_phase("save")
        end = self._end_of_step
        self._context.emergency.leave(error, end.point, end.about_left, end.proof.left_script.held)
        self._context.marker.set_phase(phase)

    def _finish(self) -> None:
        checkpointer, step = self._context.checkpointer, self._position.progress.step
        if self._start.done:
            self._position.note("taken_up")  # a resume goes on, if the script leaves `epochs` and the run in it
            if not self._position.ended and any(one.stopped for one in self._state.early_stopping.values()):
                self._position.ended = True
                self._end_of_step.note_end()
            self._end_of_step.finish_last()
            if self._train_step.transcript is not None:
                self._train_step.transcript.finish()
            length = self._position.length
            if step and not self._end_of_step.steps and (length.epochs is not None or length.steps is not None):
                self._context.reporter.say(f"it was complete already, at step {step}: nothing was trained")
        checkpointer.close()
        missing = self._start.done and not checkpointer.has(step)
        self._end_of_step.show("unsaved" if missing else "done")
        self._save_stop.final_barrier()
        if missing:
            self._context.reporter.close()  # the line about the missing checkpoint comes last
            checkpointer.leave_without(step)

    def _report(self, error: BaseException | None) -> None:
        """Tell the user why the run ends, unless the user interrupted it.

        Raises:
            SystemExit: with code 75, for an interrupt of a run that was asked to stop, and whose last step is saved.
        """
        context = self._context
        if isinstance(error, KeyboardInterrupt):
            step, saved = self._position.progress.step, self._context.checkpointer.committed_step()
            if saved == step and (reason := self._context.stop_requests.reason()):
                self._end_of_step.show("stopped")  # the launcher reads this state, too
                self._context.checkpointer.leave_stopped(step, reason)
            self._context.reporter.say(
                f"interrupted at step {step}; " + ("nothing is saved" if saved is None else f"saved: step {saved}")
            )
            silence_interrupt()
        elif isinstance(error, Exception) and not isinstance(error, TrialStopped):
            if isinstance(error, torch.OutOfMemoryError):
                self._advise(error)
            method = method_of(error, self._state.models)
            if note := self._context.strategy.explain(error, method) or explain_missing(error, self._position.metrics):
                error.add_note(note)
            if parted := context.leaves.explain(error):
                error.add_note(parted)
            if not isinstance(error, LockstepError):
                is_resumed = context.checkpointer.resumed is not None and not self._end_of_step.steps
                if self._start.resumed_at_end:
                    error.add_note(_RESUMED_AT_END)
                elif is_resumed and not isinstance(error, torch.OutOfMemoryError | MemoryError):
                    error.add_note(_RESUMED)
            add_advice(error)
            write_torchelastic_error(error, os.environ)

    def _advise(self, error: torch.OutOfMemoryError) -> None:
        """Add advice to ``error``: the settings that would fit into memory."""
        plan, device = self._context.plan.plan, self._context.device
        if plan is None or device.type != "cuda":
            return
        parameters = [p for model in self._state.models for p in model.parameters()]
        states = [v for o in self._state.optimizers for s in o.state.values() for v in s.values()]
        kept = [*parameters, *(v for v in states if isinstance(v, torch.Tensor))]
        peak = MemoryPeak(
            peak=torch.cuda.max_memory_allocated(device) + wanted_bytes(error),
            stays=staying_bytes(kept, [p for p in parameters if p.requires_grad]),
            total=torch.cuda.get_device_properties(device).total_memory,
            micro_batch=plan.micro_batch,
            global_batch=plan.global_batch,
            precision=self._context.settings.precision,
        )
        add_memory_advice(error, peak)


def method_of(error: BaseException, models: Sequence[nn.Module]) -> str:
    """The outermost method of one of ``models`` in the traceback, such as ``VAE.decode``; "" for a forward pass."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name in _CALLS and isinstance(owner, nn.Module):
            return ""  # further frames are within a forward pass, such as a hook
        if any(model is owner for model in models):
            return frame.f_code.co_qualname.replace("<locals>.", "")
    return ""


def write_torchelastic_error(error: BaseException, env: Mapping[str, str], now_s: float | None = None) -> None:
    """Write ``error`` to the file that torchrun reads, unless the file exists; does nothing under other launchers.

    torchrun takes the error of the earliest second for the cause, and of several such errors the lowest rank's. An
    error that only says that another rank is gone is therefore dated one second later.
    """
    path = env.get(_ERROR_FILE)
    if not path or Path(path).exists():
        return
    second = int(time.time() if now_s is None else now_s) + is_peer_failure(error)
    record = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(second),
        },
    }
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": record}), encoding="utf-8")


def silence_interrupt() -> None:
    """Print no traceback of an interrupt that the script does not catch, since the exit code tells of it."""
    before = sys.excepthook

    def print_others(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            before(kind, error, trace)

    sys.excepthook = print_others
