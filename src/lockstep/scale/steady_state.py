"""What a series of measured durations says: where the warm-up ends, and the median with an interval.

**Warm-up.** The first steps of a run are slower: memory is allocated, kernels are chosen, caches fill, DDP lays out its
buckets again. How many they are is found, by the marginal standard error rule (MSER; K. P. White, *An effective
truncation heuristic for bias reduction in simulation output*, Simulation 69(6), 1997): cut off as many as make the
standard error of the mean of the rest smallest, at most half. Durations count by their logarithms, held to three
times the median of the second half, so that one hiccup late in the run does not hide them. What is left
is not steady, and is said to be so, if the medians of its two halves differ by more than 5 % and nine in ten pairs of
steps, one of each half, differ the same way (the statistic of Mann and Whitney, 1947).

**Interval.** Rounds differ by more than chance within a round would make them: other processes, other placement in
memory. So the interval is from a bootstrap that draws rounds first, and then blocks of steps within each, for
neighbouring steps are alike (B. Efron, R. Tibshirani, *An Introduction to the Bootstrap*, 1993; blocks: H. Künsch,
Annals of Statistics 17(3), 1989). With one round only the blocks are drawn. The draws are seeded: the same durations
give the same interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.scale.step_profile import Timing

_HICCUP = 3.0  # times the usual duration
_SETTLED, _ALIKE = 0.05, 0.9  # how far medians of halves may be apart, and pairs that differ the same way
_DRAWS = 400
_LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Which part of a series is steady."""

    steps: int  #: to be cut off
    steady: bool  #: whether the rest is; else durations still change at the end


@dataclass(frozen=True, slots=True)
class MedianInterval:
    """A median and where it lies with 95 % confidence."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Of the interval, as a part of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


def warm_up(durations: Sequence[float]) -> WarmUp:
    """How many of ``durations`` are warm-up, by the rule above. At least two are left."""
    if len(durations) < 4:
        return WarmUp(0, steady=True)
    usual = statistics.median(durations[len(durations) // 2 :])
    values = [math.log(max(1e-9, min(d, _HICCUP * usual))) for d in durations]
    errors = [_squared_error(values[cut:]) for cut in range(len(values) // 2 + 1)]
    cut = min(range(len(errors)), key=lambda cut: (errors[cut], cut))
    return WarmUp(cut, steady=_is_steady(values[cut:]))


def _is_steady(values: Sequence[float]) -> bool:
    """Whether the logarithms ``values`` stay where they are, as the rule above has it."""
    early, late = values[: len(values) // 2], values[(len(values) + 1) // 2 :]
    moved = statistics.median(late) - statistics.median(early)
    if len(values) < 6 or abs(moved) <= _SETTLED:
        return True
    alike = sum((b - a) * moved > 0 for a in early for b in late)
    return alike < _ALIKE * len(early) * len(late)


def _squared_error(values: Sequence[float]) -> float:
    """Of the mean of ``values``, as MSER has it: their variance over their number."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values) ** 2


def median_interval(rounds: Sequence[Sequence[float]]) -> MedianInterval:
    """The median of all durations of ``rounds``, none of them empty, and its interval by the bootstrap above."""
    series = [np.asarray(each, dtype=float) for each in rounds]
    draws = np.random.default_rng(0)
    medians = [float(np.median(_drawn(series, draws))) for _ in range(_DRAWS)]
    low, high = np.quantile(medians, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    median = float(np.median(np.concatenate(series)))
    return MedianInterval(median, min(float(low), median), max(float(high), median))


def _drawn(series: Sequence[np.ndarray], draws: np.random.Generator) -> np.ndarray:
    chosen = draws.integers(len(series), size=len(series)) if len(series) > 1 else [0]
    parts = []
    for number in chosen:
        values = series[number]
        block = max(1, round(len(values) ** (1 / 3)))
        starts = draws.integers(len(values), size=-(-len(values) // block))
        places = (starts[:, None] + np.arange(block)) % len(values)
        parts.append(values[places.ravel()[: len(values)]])
    return np.concatenate(parts)


def timing(durations: Sequence[float]) -> Timing:
    """The median and the deciles of ``durations``; of none at all they are 0."""
    if not durations:
        return Timing(0.0, 0.0, 0.0)
    p10, median, p90 = np.quantile(np.asarray(durations, dtype=float), [0.1, 0.5, 0.9])
    return Timing(float(median), float(p10), float(p90))
