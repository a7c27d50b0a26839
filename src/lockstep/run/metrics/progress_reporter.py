"""How a run shows where it is: drawn by the leader itself, or left in a file for the launcher to draw."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from lockstep.launch_contract import STATUS
from lockstep.memory_use import MemoryUse, host_memory
from lockstep.progress import Progress
from lockstep.report import SilentView, State, Status, StatusFile, Throughput, choose_view
from lockstep.run.batches.pinned_copy import PinnedCopy
from lockstep.run.metrics.metric_means import Number
from lockstep.run.stopping.stop_requests import JobDeadline
from lockstep.world import World

# Often enough to look alive, seldom enough to cost nothing.
_SHOW_EVERY_S = 0.25

_ENDS: Final = ("done", "unsaved", "stopped")

SavedStep = Callable[[], int | None]


@dataclass(slots=True)
class RunLength:
    """How long the run is, as far as it is known."""

    epochs: int | None = None
    steps: int | None = None  #: where the run counts steps, and not epochs
    steps_per_epoch: int | None = None
    samples_per_epoch: int | None = None

    def steps_total(self, progress: Progress) -> int | None:
        """Steps of the whole run, if each epoch from that of ``progress`` on is as long as this one."""
        if self.epochs is None or self.steps_per_epoch is None:
            return self.steps
        before = progress.step - progress.epoch_step
        return max(progress.step, before + (self.epochs - progress.epoch) * self.steps_per_epoch)

    def samples_left(self, progress: Progress) -> int | None:
        """Samples that are still to train on."""
        if self.steps is not None:
            return (self.steps - progress.step) * progress.samples // progress.step if progress.step else None
        if self.epochs is None or self.samples_per_epoch is None:
            return None
        return max(0, self.epochs * self.samples_per_epoch - progress.samples)


class ProgressReporter:
    """Shows the user and the launcher where the run is; only on the leader."""

    def __init__(
        self,
        world: World,
        env: Mapping[str, str],
        end: JobDeadline,
        memory: Callable[[], MemoryUse] = host_memory,
        now: Callable[[], float] = time.monotonic,
        *,
        read_later: Callable[[torch.Tensor], PinnedCopy] = PinnedCopy,
        is_trial: bool = False,
    ) -> None:
        self._world: Final = world
        self._end: Final = end
        self._memory: Final = memory
        self._now: Final = now
        self._read_later: Final = read_later
        self._pace: Final = Throughput(now=now)
        self._next_at = now()
        self._loss: PinnedCopy | None = None
        self._status: Status | None = None
        self.unprotected = ""  #: as `Status.unprotected`
        path = env.get(STATUS)
        self._file = StatusFile(Path(path)) if world.leads and path else None
        self._view = choose_view(sys.stderr, env) if world.leads and not path else SilentView()
        self._is_trial: Final = is_trial  # one of many: its search is shown, not each of them

    def say(self, text: str) -> None:
        """One line for the user, from the leader."""
        if not self._world.leads:
            return
        if self._file is not None:
            _print(text)  # the launcher shows the leader's lines
        else:
            self._view.line(text)

    def print(self, text: str) -> None:
        """One line of the user's own, from the leader: shown also where progress is not."""
        if self._world.leads and isinstance(self._view, SilentView):
            _print(text)  # in the place of a view
        else:
            self.say(text)

    def step(self, progress: Progress, length: RunLength, loss: Number | None, saved_step: SavedStep) -> bool:
        """A step is done. Costs about a microsecond, and four times a second what `show` does: whether it was time."""
        self._pace.observe(progress.samples)
        if self._now() < self._next_at:
            return False
        self.show("training", progress, length, loss, saved_step)
        return True

    def show(
        self, state: State, progress: Progress, length: RunLength, loss: Number | None, saved_step: SavedStep
    ) -> None:
        """Tell where the run is now."""
        if not self._world.leads:
            return
        self._next_at = self._now() + _SHOW_EVERY_S
        if isinstance(loss, torch.Tensor) and not loss.is_cpu:
            copied, before = self._read_later(loss.detach().reshape(1)), self._loss
            self._loss = copied
            # The loss of the time before: its copy is there by now, so reading it waits for nothing.
            shown = copied if state in _ENDS else before
            value = None if shown is None else shown.read()[0]
        else:
            value = None if loss is None else float(loss)
        left = length.samples_left(progress)
        self._status = Status(
            step=progress.step,
            steps_total=length.steps_total(progress),
            epoch=progress.epoch,
            epochs=length.epochs,
            samples_per_s=self._pace.samples_per_s,
            loss=value,
            eta_s=None if left is None else self._pace.eta_s(left),
            last_saved_step=saved_step(),
            world_size=self._world.size,
            generation=self._world.generation,
            state=state,
            job_left_s=self._end.left_s,
            unprotected=self.unprotected,
            memory=self._memory(),
        )
        if self._file is not None:
            self._file.write(self._status)
        if not self._is_trial:
            self._view.show(self._status)

    def close(self) -> None:
        """The view is gone from the screen; what it said last stays."""
        self._view.close()


def _print(text: str) -> None:
    # The stream may be the script's own, or closed: what is said never ends a training.
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)  # noqa: T201
