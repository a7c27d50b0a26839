"""The setting `profile="steps 10:20"`: traces of these steps by `torch.profiler`, in one file per rank.

    DIRECTORY/profile/steps-10-20-rank0.json.gz     a Chrome trace: chrome://tracing, ui.perfetto.dev, TensorBoard, HTA
    DIRECTORY/profile/steps-10-20-rank1.json.gz

A process that resumes within the range records the rest of the range, and names its files by this rest.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lockstep.errors import UsageError
from lockstep.heartbeat import ProgressMarker
from lockstep.settings import StepRange
from lockstep.small_files import replacement
from lockstep.torch_private import profiler_is_on

_ACTIVITIES: Final = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}


class StepProfiler:
    """Records a range of this rank's steps, without any communication.

    Args:
        steps: range of steps.
        directory: for the traces; made with the first trace.
        rank: of this process.
        device: of the computation.
        marker: is told that a trace is written, which takes seconds.
        say: tells the user, from the leader.
    """

    def __init__(
        self,
        steps: StepRange,
        directory: Path,
        rank: int,
        device: torch.device,
        marker: ProgressMarker,
        say: Callable[[str], None],
    ) -> None:
        self._steps: Final = steps
        self._directory: Final = directory
        self._rank: Final = rank
        self._kinds: Final = [ProfilerActivity.CPU, *filter(None, [_ACTIVITIES.get(device.type)])]
        self._marker: Final = marker
        self._say: Final = say
        self._profile: profile | None = None
        self._step_range: record_function | None = None  # of the current step
        self._began = 0  # steps that were done when recording began
        self._done = 0  # ... and at its last step
        self._is_over = False

    def at(self, step: int) -> None:
        """Begin, continue or end recording, after ``step`` steps.

        Raises:
            UsageError: if a profiler of the script is on where recording would begin.
        """
        if self._is_over:
            return
        if self._profile is None:
            if not self._steps.first <= step < self._steps.last:
                return
            self._begin(step)
        elif step == self._done:
            return  # another pass begins
        self._done = step
        if step >= self._steps.last:
            self._end()
        else:
            self._mark_step()

    def close(self, *, failed: bool) -> None:
        """The run ends: what was recorded is written; if nothing was, and it has not ``failed``, the leader says so."""
        if self._profile is not None:
            self._end()
        if self._done == self._began and not failed:
            self._say(f"profile='{self._steps}': none of these steps was done here, so there is no trace")

    def _begin(self, step: int) -> None:
        if profiler_is_on():
            raise UsageError(
                f"profile='{self._steps}' while the script has a profiler of its own on, and torch has one at a time: "
                "leave one of the two out"
            )
        self._began = step
        # A single cycle, whose events are all kept in any case; without the argument, torch 2.11 warns.
        self._profile = profile(activities=self._kinds, acc_events=True)
        self._profile.start()

    def _mark_step(self) -> None:
        """The next step is a range in the trace, under the name by which tools know steps."""
        self._end_step()
        self._step_range = record_function(f"ProfilerStep#{self._done + 1}")
        self._step_range.__enter__()

    def _end_step(self) -> None:
        if self._step_range is not None:
            self._step_range.__exit__(None, None, None)
            self._step_range = None

    def _end(self) -> None:
        recorded, self._profile = self._profile, None
        assert recorded is not None
        self._is_over = True
        self._end_step()
        recorded.stop()
        if self._done == self._began:
            return
        phase = self._marker.set_phase("save")
        name = f"steps-{self._began}-{self._done}-rank{self._rank}.json.gz"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            # By the file's ending torch knows that the trace is to be compressed.
            with replacement(self._directory / name) as beside:
                recorded.export_chrome_trace(str(beside))
        except OSError as error:
            # A full disk must not end the training.
            warnings.warn(f"rank {self._rank} could not write {self._directory / name}: {error}", stacklevel=2)
        else:
            each = name.replace(f"rank{self._rank}", "rank*")
            self._say(f"profile: steps {self._began + 1} to {self._done} of each rank are in {self._directory / each}")
        self._marker.set_phase(phase)
