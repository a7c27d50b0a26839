"""The display of a run's progress, drawn by the leader or left in a file for the launcher; warnings of ranks."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from lockstep.collectives import Group
from lockstep.formatting import format_ranks, grouped
from lockstep.launch_contract import STATUS
from lockstep.memory_use import MemoryUse, host_memory
from lockstep.progress import Progress
from lockstep.report import SilentView, State, Status, StatusFile, Throughput, choose_view
from lockstep.run.batches.pinned_copy import PinnedCopy
from lockstep.run.checks.written_files import WrittenFiles, written_by_several
from lockstep.run.metrics.metric_means import Number
from lockstep.run.stopping.stop_requests import JobDeadline
from lockstep.world import World

# Often enough to look alive, seldom enough to cost nothing.
_SHOW_EVERY_S = 0.25

_ENDS: Final = ("done", "unsaved", "stopped")

SavedStep = Callable[[], int | None]


@dataclass(slots=True)
class RunLength:
    """The length of the run, as far as it is known."""

    epochs: int | None = None
    steps: int | None = None  #: if the run counts steps, not epochs
    steps_per_epoch: int | None = None
    samples_per_epoch: int | None = None

    def steps_total(self, progress: Progress) -> int | None:
        """The steps of the whole run, if all epochs from that of ``progress`` on have equal length."""
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
    """Shows the user and the launcher the run's progress; only on the leader."""

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
        self._is_trial: Final = is_trial  # a trial is one of many: the search is shown, not each trial

    def say(self, text: str) -> None:
        """Print a line for the user, on the leader."""
        if not self._world.leads:
            return
        if self._file is not None:
            _print(text)  # the launcher shows the leader's lines
        else:
            self._view.line(text)

    def print(self, text: str) -> None:
        """Print a line of the user's own, on the leader, also if progress is not shown."""
        if self._world.leads and isinstance(self._view, SilentView):
            _print(text)  # in the place of a view
        else:
            self.say(text)

    def step(self, progress: Progress, length: RunLength, loss: Number | None, saved_step: SavedStep) -> bool:
        """Note a step, and show progress four times a second; whether it was shown. Costs about a microsecond."""
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
            # The loss from the display before, whose copy has arrived, so reading it does not wait.
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
        """Close the view; its last lines stay on the screen."""
        self._view.close()


def _print(text: str) -> None:
    # The stream may be the script's own, or closed: printing must never end a training.
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)  # noqa: T201


class RankWarnings:
    """Warnings of ranks: the leader prints its own at once, and those of other ranks where all ranks meet next.

    Args:
        group: all ranks.
        say: prints one line, on the leader.
        protect: keeps the newest checkpoint in addition to those kept anyway.
    """

    def __init__(self, group: Group, say: Callable[[str], None], protect: Callable[[], None]) -> None:
        self._group: Final = group
        self._files: Final = WrittenFiles() if group.size > 1 else None
        self._say: Final = say
        self._protect_newest: Final = protect
        self._waiting: list[tuple[str, str, bool]] = []  # of this rank, for the leader to print
        self._found: set[str] = set()  # what this rank's were about, each printed once
        self._protects = False

    def add(self, text: str, about: str = "") -> None:
        """This rank has found ``text``, which other ranks may find, too; said once of each.

        With ``about``, in which the numbers of a rank are left out, said once by all ranks together.
        """
        self._add(text, about, spoils=False)

    def add_spoilt(self, text: str) -> None:
        """Add the warning ``text``, printed once, and protect the newest checkpoint, since later ones may be spoilt."""
        self._protect()
        self._add(text, text, spoils=True)

    def say_all(self) -> None:
        """Print the other ranks' warnings on the leader, each text once. Collective."""
        waiting, self._waiting = self._waiting, []
        files = {} if self._files is None else self._files.take()
        found = self._group.gather_objects((waiting, files), "warnings")
        by_text = grouped((each, rank) for rank, (texts, _) in enumerate(found) for each in texts)
        for (text, about, spoils), ranks in by_text.items():
            if spoils:
                self._protect()  # on the leader, too, which removes older checkpoints; no save came in between
            if about and about in self._found:
                continue
            self._found.add(about)
            self._say(text if spoils else f"{format_ranks(ranks)}: {text}")
        if self._group.leads and self._files is not None:
            several = written_by_several([written for _, written in found], self._files.told)
            if several:
                self._say(several)

    def close(self) -> None:
        """Nothing more is found."""
        if self._files is not None:
            self._files.close()

    def _add(self, text: str, about: str, *, spoils: bool) -> None:
        if (about or text) in self._found:
            return
        self._found.add(about or text)
        if self._group.leads:
            self._say(text)
        else:
            self._waiting.append((text, about, spoils))

    def _protect(self) -> None:
        if not self._protects:
            self._protects = True
            self._protect_newest()
