"""A link between devices: how long an all-reduce of so many bytes takes on it.

    seconds(S, n) = floor(n) + 2 (n - 1) / n * S / B(S)         a ring; NCCL's bus bandwidth B folds in the rest
    floor(n)      = latency of the measured n + hop * (steps(n) - steps(measured n))

The latency of a link between nodes is what it adds to a sum within each of them: a sum over several nodes takes both.

Within a node a ring takes 2 (n - 1) steps, between nodes a tree takes 2 log2(n), as NCCL does (src/graph/tuning.cc).
B(S) comes from a measured curve, interpolated on a log-log scale, or is one number. Ten measured sizes interpolated so
are within 3 to 6 % on sizes between them; one bandwidth and one latency, within 8 to 16 %.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

from lockstep.scale.step_profile import LinkProfile

Place = Literal["within", "between"]

#: With which power of the size times fall below the smallest measured one, and until where: two nodes of H100 in
#: benchmarks/published/nccl_curves.csv, where a sum of 1 KiB takes four fifths of the time of 32 KiB.
_SMALL: Final = 0.07
_LEAST_BYTES: Final = 1024.0


@dataclass(frozen=True)
class Curve:
    """Measured times of an all-reduce between `ranks` ranks, or groups of ranks, by size.

    Where noise makes times fall as sizes grow, the nearest times that do not fall take their place.
    """

    ranks: int
    sizes: tuple[float, ...]  #: bytes, ascending
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds) or self.ranks < 2:
            raise ValueError(f"a curve of {len(self.sizes)} sizes and {len(self.seconds)} times of {self.ranks} ranks")
        object.__setattr__(self, "seconds", _not_falling(self.seconds))

    @cached_property
    def _logs(self) -> tuple[Sequence[float], Sequence[float]]:
        return [math.log(size) for size in self.sizes], [math.log(time) for time in self.seconds]

    def at(self, size: float) -> float:
        """Seconds for ``size`` bytes: between two sizes log-log, beyond them as flat and as steep as a link is."""
        sizes, times = self._logs
        if size <= self.sizes[0]:
            return math.exp(times[0])
        if size >= self.sizes[-1]:
            return math.exp(times[-1]) * size / self.sizes[-1]
        x, right = math.log(size), bisect_left(self.sizes, size)
        weight = (x - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return math.exp(times[right - 1] + weight * (times[right] - times[right - 1]))


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the devices of a node, or nodes."""

    name: str
    place: Place
    bytes_per_s: float  #: bus bandwidth at large sizes
    latency_s: float  #: of the smallest all-reduce between `ranks`
    hop_s: float  #: each further step
    ranks: int  #: between which latency and curve were measured
    source: str
    error: float  #: relative, of a measured time against this one
    curve: Curve | None = None
    shared: bool = False  #: the bandwidth is that of all ranks together, as where they talk through the host's memory

    @classmethod
    def measured(cls, profile: LinkProfile, place: Place, error: float = 0.05, within_s: float = 0.0) -> Link:
        """The link that ``profile`` was measured on; ``within_s`` of a sum between nodes passes within each of them."""
        largest, longest = profile.bytes[-1], profile.seconds[-1]
        ranks = profile.nodes if place == "between" and profile.nodes > 1 else profile.ranks
        curve = Curve(ranks, tuple(map(float, profile.bytes)), profile.seconds)
        latency = max(curve.seconds[0] - within_s, curve.seconds[0] / 4)
        return cls(
            name=f"measured {profile.backend}, {profile.ranks} ranks",
            place=place,
            bytes_per_s=2 * (ranks - 1) / ranks * largest / longest,
            latency_s=latency,
            hop_s=latency / _steps(place, ranks),
            ranks=ranks,
            source=f"measured all-reduce of {profile.ranks} ranks on {profile.nodes} nodes",
            error=error,
            curve=curve,
        )

    def scaled(self, factor: float) -> Link:
        """The same link with ``factor`` times the bandwidth."""
        curve = self.curve
        if curve is not None:
            floor = curve.seconds[0]
            times = tuple(floor + max(0.0, time - floor) / factor for time in curve.seconds)
            curve = Curve(curve.ranks, curve.sizes, times)
        return replace(self, bytes_per_s=self.bytes_per_s * factor, curve=curve)

    def floor_s(self, ranks: int, size: float = math.inf) -> float:
        """Seconds of the smallest measured all-reduce between ``ranks``; somewhat less for ``size`` bytes below it."""
        least = self.latency_s / 4  # a smaller world saves steps, and not the call itself
        time = max(least, self.latency_s + self.hop_s * (_steps(self.place, ranks) - _steps(self.place, self.ranks)))
        smallest = self.curve.sizes[0] if self.curve else 0.0
        return time if size >= smallest else time * (max(size, _LEAST_BYTES) / max(smallest, _LEAST_BYTES)) ** _SMALL

    def volume_s(self, size: float, ranks: int) -> float:
        """Seconds beyond the floor, for ``size`` bytes on each of ``ranks``."""
        share = (ranks - 1) / ranks
        if self.curve is not None:
            known = self.curve
            beyond = max(0.0, known.at(size) - known.seconds[0])
            time = max(beyond * share / ((known.ranks - 1) / known.ranks), 0.0)
        else:
            time = 2 * share * size / self.bytes_per_s
        # Where ranks share one memory, their traffic adds up.
        return time * (ranks / 2 if self.shared else 1)


def _not_falling(values: Sequence[float]) -> tuple[float, ...]:
    """The least change of ``values``, by squares, after which none is below the one before (isotonic regression)."""
    pools: list[tuple[float, int]] = []  # mean and count; two that fall are one
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    return tuple(mean for mean, count in pools for _ in range(count))


def _steps(place: Place, ranks: int) -> float:
    return 2.0 * (ranks - 1) if place == "within" else 2 * math.log2(max(ranks, 1))
