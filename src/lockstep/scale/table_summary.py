"""How good predictions for a table are, for each group of its rows: errors, and what lies in how wide intervals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lockstep.scale.table_prediction import TablePrediction

_GROUPS: Final[Mapping[str, Callable[[TablePrediction], bool]]] = {
    "all": lambda one: True,
    "weak scaling": lambda one: not one.row.strong,
    "strong scaling": lambda one: one.row.strong,
    "one node": lambda one: one.row.nodes == 1,
    "several nodes": lambda one: one.row.nodes > 1,
}


@dataclass(frozen=True, slots=True)
class GroupErrors:
    """Errors are parts of what was measured, the width of an interval a part of what is predicted."""

    group: str
    rows: int
    mean_error: float
    median_error: float
    tail_error: float  #: nine of ten rows have less
    inside: float  #: the part of the rows whose measured throughput lies in the interval
    median_width: float


def summarize(found: Sequence[TablePrediction]) -> list[GroupErrors]:
    """Each group that has rows; those not measured, and those that the table calls suspect, do not count."""
    counted = [one for one in found if one.error is not None and not one.row.suspect]
    groups = ((name, [one for one in counted if belongs(one)]) for name, belongs in _GROUPS.items())
    return [errors_of(name, members) for name, members in groups if members]


def errors_of(group: str, found: Sequence[TablePrediction]) -> GroupErrors:
    """Those of ``found``, at least one, of which each is measured."""
    errors = sorted(abs(one.error or 0.0) for one in found)
    return GroupErrors(
        group=group,
        rows=len(found),
        mean_error=statistics.mean(errors),
        median_error=statistics.median(errors),
        tail_error=errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        inside=statistics.mean(float(bool(one.inside)) for one in found),
        median_width=statistics.median((one.high - one.low) / one.predicted for one in found),
    )
