"""What a search and the run of a trial agree on: where its files are, whose weights it begins with, whom it reports to.

`tune` says which trial this process evaluates, and `run` asks; they never import each other's parts for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: In the directory of a trial: the checkpoints of its run.
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True)
class CurrentTrial:
    """The trial that this process evaluates as one of its ranks."""

    number: int
    directory: Path  #: of its files, the same through all attempts
    attempt: int  #: from 1
    inherits: Path | None  #: directory of the trial whose weights it begins with
    #: Takes a loss and how many were reported before it; answers why the trial is to end, "" to go on. Asked on the
    #: leader only.
    report: Callable[[float, int], str]
    repeat: int = 0  #: 0; or which further evaluation of the same parameters it is, whose runs have seeds of their own
    #: How many losses each run has reported that was opened in this attempt, in their order. An objective may open
    #: several, such as one for each fold of a cross-validation: they share no files, and their reports are one curve.
    reports_of_runs: list[Callable[[], int]] = field(default_factory=list)


def directory_of_run(trial: Path, number: int) -> Path:
    """Where the run ``number`` of the trial in the directory ``trial`` has its files, from 0."""
    return trial if number == 0 else trial / f"run-{number + 1}"


_evaluated: list[CurrentTrial] = []  # the last one now


def current_trial() -> CurrentTrial | None:
    """The trial that is being evaluated; None outside of a search."""
    return _evaluated[-1] if _evaluated else None


@contextlib.contextmanager
def evaluating(trial: CurrentTrial) -> Iterator[None]:
    """Within, this process evaluates ``trial``."""
    _evaluated.append(trial)
    try:
        yield
    finally:
        _evaluated.remove(trial)
