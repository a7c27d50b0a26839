"""Which micro-batches of a step go through one schedule of torch together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """A run of one schedule: the micro-batches that go through it, which are neighbours."""

    schedule: str
    first: int  #: the index of its first micro-batch among the rank's
    length: int


def schedule_runs(specs: Sequence[object], schedule: str, ranks: int) -> list[ScheduleRun]:
    """How a rank's micro-batches of a step go through a replica of ``ranks`` ranks.

    A schedule takes micro-batches of one shape, so a short last one goes by itself. 1F1B needs as many micro-batches
    as ranks; with fewer it would be no other than GPipe. Interleaving and zero-bubble go in rounds of as many as ranks,
    or in one of fewer.

    Args:
        specs: one for each micro-batch; equal for equal shapes.
        schedule: gpipe, 1f1b, interleaved, zero-bubble or zbv.
        ranks: of one replica.
    """
    made: list[ScheduleRun] = []
    first = 0
    while first < len(specs):
        length = 1
        while first + length < len(specs) and specs[first + length] == specs[first]:
            length += 1
        if schedule in ("interleaved", "zero-bubble"):
            rest = length % ranks
            runs = ((first, length - rest), (first + length - rest, rest))
            made += [ScheduleRun(schedule, start, count) for start, count in runs if count]
        else:
            made.append(ScheduleRun("gpipe" if schedule == "1f1b" and length < ranks else schedule, first, length))
        first += length
    return made
