"""The run's record of metrics, the user's line with metrics, and the trackers that receive metrics.

Also the run's record of its start in ``run.json``: settings, including the script's, and hardware.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from lockstep.errors import MismatchError, TrialStopped, UsageError
from lockstep.formatting import command_line
from lockstep.launch_contract import RUN_DIR
from lockstep.provenance import hardware, settings_record, surroundings
from lockstep.report import (
    LogsValues,
    MetricsFile,
    TrackerContext,
    TrackerThread,
    about_run,
    change_about_run,
    open_trackers,
    record_row,
)
from lockstep.run.metrics.common_numbers import common_numbers
from lockstep.run.setup.run_context import RunContext
from lockstep.trial_contract import current_trial

LoggedRow = tuple[int, int, dict[str, float]]
"""A step, an epoch, and values by name."""

Ending = Literal["ended", "stopped", "failed"]
#: Number of seconds that a run waits for its trackers. Importing one takes half a minute on a busy machine; a user who
#: stops a run waits for about as long in all.
_TRACKERS_S: Final[Mapping[Ending, float]] = {"ended": 60.0, "stopped": 15.0, "failed": 2.0}
_MOST_GIVEN: Final = 1000  # values that wait to be compared


class RunLog:
    """The log of metrics, written and printed by the leader only.

    Args:
        context: of the run; in its directory, if it has one, is ``metrics.jsonl``.
        tracker: the script's own.
    """

    def __init__(self, context: RunContext, tracker: LogsValues | None) -> None:
        self._context: Final = context
        self._tracker: Final = tracker
        self._leads: Final = context.group.leads
        every = context.settings.log_every
        self._every: Final = None if every is None else int(every.every)
        self._file: MetricsFile | None = None
        self._trackers: list[TrackerThread] = []
        self._given: dict[tuple[str, int], list[int | float]] = {}  # values logged by the script, by name and step
        self.rows: list[LoggedRow] = []  #: rows logged since `forget_rows`, on every rank

    def open(self, step: int) -> None:
        """Open the file, as the run goes on from ``step``; rows of later steps are removed."""
        if not self._leads:
            return
        directory, settings, say = self._context.directory, self._context.resolved, self._context.reporter.say
        record: list[dict[str, float]] = []
        if directory:
            path = Path(directory, "metrics.jsonl")
            self._file = MetricsFile(path, step=step, say=say)
            # Else a power cut could leave a checkpoint without the rows logged before it, which no run logs again.
            self._context.checkpointer.before_commit(self._file.flush)
            try:
                record = MetricsFile.read(path) if path.exists() else []
            except OSError as error:
                say(f"{path} cannot be read: {error.strerror}; trackers get nothing until the run is started again")
                return
        context = TrackerContext(Path(directory or "runs"), settings.as_dict(), step)
        self._trackers = open_trackers(settings.values.track, self._tracker, context, record, say)

    def write(self, values: dict[str, object], step: int, epoch: int) -> None:
        """Write ``values`` to the file, if there is one, and to the trackers, and tell the user.

        Args:
            values: by name.
            step: steps done.
            epoch: the current epoch, from 1; a value named ``epoch`` replaces it.
        """
        if self._context.emergency.notes:
            plain = record_row(step, epoch, values, 0.0)
            self.rows.append((step, epoch, {name: plain[name] for name in values}))
        if not self._leads:
            return
        row: dict[str, float] | None = None
        if self._file is not None:
            row = self._file.write(step, epoch, values)
        elif self._trackers:
            row = record_row(step, epoch, values, time.time())
        if row is not None:
            for tracker in self._trackers:
                tracker.log(row)
        texts = (f"{name} {_on_screen(value)}" for name, value in ({"epoch": epoch} | values).items())
        self._context.reporter.say(f"step {step}: " + ", ".join(texts))

    def note_given(self, values: Mapping[str, object], step: int) -> None:
        """Note ``values`` given by the script, which must be equal on all ranks that log them.

        Values logged within a pass, where ranks are at different micro-batches, are not noted.
        """
        if self._context.metrics.inside is not None or self._context.group.size == 1 or len(self._given) > _MOST_GIVEN:
            return
        for name, number in common_numbers(values).items():
            self._given.setdefault((name, step), []).append(number)

    def compare_given(self) -> None:
        """Check that values logged by the script since the last call are equal on all ranks. Collective.

        Values that only some ranks have logged are not compared.

        Raises:
            MismatchError: naming the first value that differs.
        """
        given, self._given = self._given, {}
        if self._context.share.replica is None:
            given = {}  # a server rank has no micro-batches
        first, *others = self._context.group.gather_objects(given, "what run.log(...) was given")
        for rank, theirs in enumerate(others, 1):
            for (name, step), values in first.items():
                pairs = zip(values, theirs.get((name, step), ()), strict=False)
                if odd := next(((one, other) for one, other in pairs if repr(one) != repr(other)), None):
                    raise MismatchError(
                        f"run.log({name}=...) after step {step}: it is {odd[0]:.6g} on rank 0 and {odd[1]:.6g} on rank "
                        f"{rank}, and the first would be shown as that of all ranks. Use run.measure({name}=...) in "
                        "the loop over micro-batches, or run.sum(...) of what each rank has added up; what is one "
                        "rank's own on purpose is logged under `if run.leads:`"
                    )

    def write_recent(self) -> None:
        """Write the recent means, at the end of every ``log_every`` steps. Collective then."""
        position, context = self._context.position, self._context
        if self._every is not None and position.progress.step % self._every == 0:
            means = {f"{name}_step": mean for name, mean in context.metrics.reduce_recent(context.group).items()}
            self.write(means | _learning_rates(context.state.optimizers), position.progress.step, position.epoch_number)

    def forget_rows(self) -> None:
        """Forget all rows at a step's end: a run that resumes from there logs later rows again."""
        self.rows.clear()

    def close(self, ending: Ending) -> None:
        """Close the file, and the trackers once they have received all rows, or after a timeout."""
        if self._file is not None:
            self._file.close()
        until = time.monotonic() + _TRACKERS_S[ending]
        for tracker in self._trackers:
            tracker.end()
        for tracker in self._trackers:
            while (left_s := until - time.monotonic()) > 0 and not tracker.has_ended(min(left_s, 1.0)):
                self._context.marker.set_phase("exit")  # waiting for a tracker is no hang
            tracker.close(_TRACKERS_S[ending])


class TrialReports:
    """Hands reported losses of a trial to the search, on the leader, and its decision to all ranks.

    Args:
        context: of the run.
        log: records the losses, too.
        is_repeating: whether a resumed script repeats the part before the checkpoint.
    """

    def __init__(self, context: RunContext, log: RunLog, is_repeating: Callable[[], bool]) -> None:
        self._context: Final = context
        self._log: Final = log
        self._is_repeating: Final = is_repeating
        trial = current_trial()
        self._before: Final = [] if trial is None else list(trial.reports_of_runs)
        if trial is not None:
            position = context.position  # not the context, which would outlive the run with all its objects
            trial.reports_of_runs.append(lambda: position.reports)

    def report(self, loss: float | torch.Tensor) -> None:
        """Record ``loss``, and give it to the search of which this run is a trial. Collective.

        Raises:
            TrialStopped: on all ranks, if the search stops the trial.
        """
        value = _number(loss)
        # After a resume, the part of a turn before the pass that goes on runs again.
        if self._is_repeating():
            return
        context, position, trial = self._context, self._context.position, current_trial()
        before = position.reports
        position.reports += 1
        self._log.write({"reported": value}, position.progress.step, position.epoch_number)
        if trial is None:
            return
        before += sum(reports() for reports in self._before)
        reason = trial.report(value, before) if context.group.leads else ""
        reason = context.group.broadcast_object(reason, "run.report")
        if reason:
            raise TrialStopped(f"trial {trial.number} is stopped: {reason}")


def _number(loss: object) -> float:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return float(loss)
    if isinstance(loss, int | float) and not isinstance(loss, bool):
        return float(loss)
    raise UsageError(f"run.report({loss!r}): give one number, such as run.metrics['loss']")


def _learning_rates(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, object]:
    """The learning rate of each optimizer's first group for the next step; named ``lr`` for a single optimizer."""
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers if "lr" in optimizer.param_groups[0]]
    names = ["lr"] if len(optimizers) == 1 else [f"lr_{number}" for number in range(len(rates))]
    return dict(zip(names, rates, strict=False))


def _on_screen(value: object) -> str:
    """The text of ``value``, with four digits for a floating-point number, also of NumPy or torch."""
    if isinstance(value, torch.Tensor | np.generic) and value.ndim == 0:
        value = value.item()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def record_start(context: RunContext, env: Mapping[str, str]) -> None:
    """Record the settings and hardware of this run's start in ``run.json``. Collective.

    Under our launcher the file has the start already. Without it, as under ``python train.py`` or torchrun, the file is
    in the directory of the checkpoints, and the leader writes all of it.

    Recorded only for a script's first run, and for no trial of a search; a file that cannot be written stops no run.
    """
    directory, world, group = context.directory, context.world, context.group
    launched = bool(env.get(RUN_DIR))
    if directory is None or current_trial() is not None or (launched and directory != env[RUN_DIR]):
        return
    nodes: dict[str, Any] = {}
    if world.nodes > 1:
        own = {socket.gethostname(): hardware()} if world.local_rank == 0 else {}
        for told in group.gather_objects(own, "the hardware of each node"):
            nodes |= told
    path = Path(directory)
    if not group.leads or (launched and about_run(path) is None):
        return

    def change(about: dict[str, Any]) -> None:
        if not launched:
            about["starts"].append(_begun(path, group.size))
        start = about["starts"][-1]
        start["settings"] = settings_record(context.resolved)
        start["nodes"] = {**start["nodes"], **nodes}

    with contextlib.suppress(OSError, LookupError, TypeError):  # the file may have been changed by a user
        path.mkdir(parents=True, exist_ok=True)
        change_about_run(path, change)


def _begun(run_dir: Path, ranks: int) -> dict[str, object]:
    script = getattr(sys.modules["__main__"], "__file__", None)
    return {
        "command": command_line(sys.orig_argv),
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "ranks": ranks,
        **surroundings(Path(script).parent if script else Path.cwd(), run_dir),
    }
