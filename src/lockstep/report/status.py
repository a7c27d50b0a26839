"""Where a run and its ranks are right now, and the files through which the launcher and other terminals learn of it.

Run, on the leader             ─►  status file                              ─►  lockstep run, lockstep top
lockstep run, one on each node ─►  ranks-0000.json, ranks-0001.json ...     ─►  lockstep top

How fast a run goes and when it will be done::

    observations   |....|....|....|..............................|....|....|
    intervals        0.25 s or more each      a pause               told apart by its seconds per sample

Steps come in any rhythm, and evaluations, checkpoints and a suspended machine lie between them.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self, TypeVar

from lockstep.formatting import count, duration, harmless, plural
from lockstep.memory_use import UNKNOWN, MemoryUse
from lockstep.records import from_known, object_from, of_kind, read_bytes, value_in
from lockstep.small_files import replace_text

T = TypeVar("T")
State = Literal["training", "evaluating", "saving", "done", "unsaved", "stopped", "failed"]
#: Less waiting than this is not reported: all ranks wait a little for each other.
_NOTEWORTHY = 0.1
_INTERVAL_S = 0.25  # shorter ones are joined: single steps of a small model are mostly noise
_INTERVALS = 60  # remembered; the speed is that of these
_PAUSE = 4.0  # an interval is a pause if its samples took this many times as long as usual


@dataclass(frozen=True, slots=True)
class Status:
    """Where a run is; what is not known yet is None."""

    step: int  #: optimizer steps done
    steps_total: int | None = None  #: steps of the whole run
    epoch: int = 0  #: the epoch in work, from 0
    epochs: int | None = None  #: epochs of the whole run
    samples_per_s: float | None = None  #: over all ranks
    #: of the leader's last micro-batch that was looked at, and at the end the mean of the last pass; may be nan
    loss: float | None = None
    eta_s: float | None = None  #: seconds until the run is done
    last_saved_step: int | None = None  #: step of the newest whole checkpoint
    world_size: int = 1
    generation: int = 0
    state: State = "training"
    job_left_s: float | None = None  #: seconds until the run must begin to stop for the end of its job
    late: str = ""  #: who keeps the others waiting, in words
    unprotected: str = ""  #: why the death of a rank would lose steps, where it should lose none, in words
    memory: MemoryUse = UNKNOWN  #: of the leader; every rank's is in the files of `RanksFile`

    @property
    def ended(self) -> bool:
        """No step will follow in this generation."""
        return self.state in ("done", "unsaved", "stopped", "failed")

    def words(self) -> dict[str, str]:
        """Short ASCII words for a person, by what they tell; what is not known is left out."""
        words = {
            "state": self.state,
            "step": f"step {count(self.step)}" + (f"/{count(self.steps_total)}" if self.steps_total else ""),
            "epoch": f"epoch {epoch_number(self.epoch, self.epochs)}" + (f"/{self.epochs}" if self.epochs else ""),
            "ranks": plural(self.world_size, "rank"),
        }
        if self.samples_per_s is not None:
            words["speed"] = f"{count(self.samples_per_s)} samples/s"
        if self.loss is not None:
            is_share = self.world_size > 1 and not self.ended
            words["loss"] = f"loss {self.loss:.4g}{' on rank 0' if is_share else ''}"
        if self.eta_s is not None and not self.ended and self.step != self.steps_total:
            words["eta"] = f"{duration(self.eta_s)} left"
        if self.job_left_s is not None and not self.ended:
            words["job"] = f"job leaves {duration(self.job_left_s)}"
            if self.eta_s is not None:
                spare_s = self.job_left_s - self.eta_s
                words["job"] += f", {duration(abs(spare_s))} {'spare' if spare_s >= 0 else 'short'}"
        if self.late and not self.ended:
            words["late"] = harmless(self.late)
        if self.unprotected and not self.ended:
            words["unprotected"] = harmless(self.unprotected)
        if self.last_saved_step is not None:
            words["saved"] = f"saved at step {count(self.last_saved_step)}"
        if self.generation:
            words["generation"] = f"generation {self.generation}"
        return words

    def to_json(self) -> str:
        """One line of JSON; a loss that is not finite as ``"nan"``, ``"inf"`` or ``"-inf"``."""
        return json.dumps({name: plain(value) for name, value in asdict(self).items()}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """What `to_json` wrote.

        Raises:
            ValueError: if it is something else.
        """
        values = object_from(text)
        try:
            for name in ("samples_per_s", "loss", "eta_s", "job_left_s"):
                values[name] = number(values[name])
        except KeyError as error:
            raise ValueError(f"no status of a run: {text[:80]!r}") from error
        return from_known(cls, values)


def epoch_number(epoch: int, epochs: int | None) -> int:
    """The epoch in work as people count, from 1, wherever it is shown or recorded; after the last one, its number.

    Args:
        epoch: how many are done.
        epochs: of the whole run, as far as known.
    """
    return min(epoch + 1, epochs) if epochs else epoch + 1


def plain(value: object) -> object:
    """``value`` as JSON can hold it: nan and the infinities, for which JSON has no number, as text."""
    return str(value) if isinstance(value, float) and value - value != 0 else value


def number(value: T) -> T | float:
    """What `plain` was given."""
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value


class StatusFile:
    """A small file that always holds one whole status.

    Args:
        path: the file; its directory exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, status: Status) -> None:
        """Replace the status: a reader finds the old one or the new one, never part of one.

        Costs about 0.1 ms on a local disk; the caller chooses how often. One that cannot be written, such as on a
        full disk, is dropped: it is news for a screen, and the next one may fit.
        """
        with contextlib.suppress(OSError):
            replace_text(self._path, status.to_json())

    @staticmethod
    def read(path: Path) -> Status | None:
        """The status at ``path``; None if there is none."""
        try:
            return Status.from_json(read_bytes(path))
        except (OSError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Where one rank is; all of it as it was when it was last heard."""

    rank: int
    step: int  #: optimizer steps done; -1 while nobody counts them
    phase: str
    place: str  #: the user's line, such as ``train.py:17``, and what it has called
    waits: float | None = None  #: the part of its last seconds in which it waited for other ranks
    silent_s: float = 0.0  #: since it was last heard
    memory: MemoryUse = UNKNOWN  #: of the host's and its device's


def lateness(ranks: Sequence[RankStatus]) -> str:
    """Who keeps the others waiting, such as ``3 ranks wait 38 % for rank 2``; "" if nobody does much."""
    known = [(one.waits, one.rank) for one in ranks if one.waits is not None]
    if len(known) < 2:
        return ""
    least, late = min(known)
    others = sorted(waits for waits, rank in known if rank != late)
    usual = others[len(others) // 2]
    if usual - least < _NOTEWORTHY:
        return ""
    return f"{len(others)} rank{'s wait' if len(others) > 1 else ' waits'} {usual:.0%} for rank {late}".replace(
        "%", " %"
    )


class RanksFile:
    """One launcher's file in the run directory.

    Args:
        run_dir: it exists.
        number: of this launcher's node.
    """

    def __init__(self, run_dir: Path, number: int) -> None:
        #: The file.
        self.path = run_dir / f"ranks-{number:04d}.json"

    def write(self, ranks: Sequence[RankStatus]) -> None:
        """Replace what is there. What cannot be written, such as on a full disk, is dropped."""
        with contextlib.suppress(OSError):
            replace_text(self.path, json.dumps([asdict(one) for one in ranks]))

    @staticmethod
    def read_all(run_dir: Path) -> list[RankStatus]:
        """What the launchers of all nodes have written, by rank; what cannot be read is left out."""
        found: dict[int, RankStatus] = {}
        for path in sorted(run_dir.glob("ranks-*.json")):
            with contextlib.suppress(OSError, ValueError):
                ranks = of_kind(list[RankStatus], value_in(read_bytes(path)), path.name)
                found |= {one.rank: one for one in ranks}
        return [found[rank] for rank in sorted(found)]


class Throughput:
    """Samples per second, and the time left, from how many samples were done when.

    An evaluation, a checkpoint or a suspended laptop is a pause: the speed leaves it out. The time left counts the
    pauses that recur, at their median length, so that evaluations are in it and one suspended night is not.

    Args:
        now: the clock, in seconds; it never goes back.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._intervals: deque[tuple[float, int]] = deque(maxlen=_INTERVALS)
        self._pauses_s: deque[float] = deque(maxlen=_INTERVALS)
        self._num_pauses = 0
        self._start: tuple[float, int] | None = None  # of the interval being filled
        self._samples = 0  # observed since the beginning

    def observe(self, samples: int) -> None:
        """Note that ``samples`` are done by now, counted from any beginning. Costs about a microsecond.

        A count below the one before starts over, as after a restart from an older checkpoint.
        """
        now_s = self._now()
        if self._start is None or samples < self._start[1]:
            self._start = (now_s, samples)
            return
        began_s, had = self._start
        if now_s - began_s < _INTERVAL_S or samples == had:
            return
        self._start = (now_s, samples)
        self._samples += samples - had
        self._note(now_s - began_s, samples - had)

    @property
    def samples_per_s(self) -> float | None:
        """The speed while training; None before anything is known."""
        usual = self._usual_s()
        kept = [(s, n) for s, n in self._intervals if s / n <= _PAUSE * usual]
        return sum(n for _, n in kept) / sum(s for s, _ in kept) if kept else None

    def eta_s(self, samples_left: int) -> float | None:
        """Seconds until ``samples_left`` more are done; None before anything is known."""
        speed = self.samples_per_s
        if speed is None:
            return None
        recurring = self._num_pauses if self._num_pauses > 1 else 0
        pause_s = statistics.median_low(self._pauses_s) if recurring else 0.0
        return samples_left * (1 / speed + pause_s * recurring / self._samples)

    def _note(self, seconds: float, samples: int) -> None:
        usual = self._usual_s()
        self._intervals.append((seconds, samples))
        if usual and seconds / samples > _PAUSE * usual:
            self._pauses_s.append(seconds - usual * samples)
            self._num_pauses += 1

    def _usual_s(self) -> float:
        """Median seconds per sample; a change of speed for good becomes the usual after half the intervals."""
        return statistics.median_low(s / n for s, n in self._intervals) if self._intervals else 0.0
