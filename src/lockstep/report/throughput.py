"""How fast a run goes and when it will be done.

    observations   |....|....|....|..............................|....|....|
    intervals        0.25 s or more each      a pause               told apart by its seconds per sample

Steps come in any rhythm, and evaluations, checkpoints and a suspended machine lie between them.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

_INTERVAL_S = 0.25  # shorter ones are joined: single steps of a small model are mostly noise
_INTERVALS = 60  # remembered; the speed is that of these
_PAUSE = 4.0  # an interval is a pause if its samples took this many times as long as usual


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
