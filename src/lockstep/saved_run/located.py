"""Which checkpoint is meant: by a run's directory, and by a step or by what the step is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

from lockstep.checkpoint import CheckpointReader, Committed, list_checkpoints, verify
from lockstep.errors import CheckpointError, DamagedCheckpoint, SettingError
from lockstep.records import of_kind

T = TypeVar("T")

BEST, NEWEST = "best", "newest"

RunPath = str | os.PathLike[str]


def checkpoints_of(run: RunPath) -> tuple[Committed, ...]:
    """What is committed of a run, newest first; one alone, if ``run`` is the directory of a checkpoint.

    Raises:
        SettingError: if there is no checkpoint.
    """
    path = Path(run)
    if not path.is_dir():
        raise SettingError(f"{path}: no such directory; give a run directory, such as runs/NAME, or one of checkpoints")
    absolute = path.absolute()
    alone = [one for one in list_checkpoints(absolute.parent) if one.path == absolute]
    found = alone or list_checkpoints(absolute) or list_checkpoints(absolute / "checkpoints")
    if not found:
        raise SettingError(
            f"{path} holds no checkpoint, and neither does {path / 'checkpoints'}; if the run was given "
            "--checkpoint DIR, name that directory"
        )
    return tuple(found)


def open_checkpoint(run: RunPath, step: int | str) -> CheckpointReader:
    """The checkpoint of ``run`` that ``step`` names: a number, ``newest``, or ``best`` by the run's own measure.

    Raises:
        SettingError: if there is none such.
        DamagedCheckpoint: if it is not whole; names the newest one that is.
    """
    found = checkpoints_of(run)
    if step == BEST:
        best = best_of(open_whole(found[0], found))
        if best is None:
            raise SettingError(
                f"{run} does not know a best step: say Run(best=...) with the name of a metric that the script "
                f"measures, or ask for a step, such as {found[0].step}"
            )
        step = int(best["step"])
    if step == NEWEST:
        return open_whole(found[0], found)
    try:
        number = int(step)
    except ValueError:
        raise SettingError(f"step {step!r}: give a number, {NEWEST} or {BEST}") from None
    chosen = [one for one in found if one.step == number]
    if not chosen:
        raise SettingError(f"{run} has no checkpoint of step {number}; it has {_steps(found)}")
    return open_whole(chosen[0], found)


def open_whole(one: Committed, found: tuple[Committed, ...]) -> CheckpointReader:
    """Open ``one`` of all that was ``found``.

    Raises:
        DamagedCheckpoint: if its files are not all there in full size; names the newest one that is whole.
    """
    try:
        return CheckpointReader(one.path)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{error}. {way_out(one, found)}") from error


def way_out(damaged: Committed, found: tuple[Committed, ...]) -> str:
    """What to do, now that ``damaged`` is not whole. Reads the others until one is."""
    for other in found:
        if other != damaged and is_whole(other):
            return f"The newest whole one is of step {other.step}: ask for that step"
    return "There is no other that is whole"


def is_whole(one: Committed) -> bool:
    """Whether all its bytes are those that were committed; reads all of them."""
    try:
        verify(one.path)
    except (CheckpointError, OSError):
        return False
    return True


def best_of(newest: CheckpointReader) -> dict[str, Any] | None:
    """What a run's ``newest`` checkpoint says of its best step: ``metric``, ``mode``, ``value`` and ``step``."""
    best: dict[str, Any] = told_in(newest, "best", dict[str, Any], {})
    return best if isinstance(best.get("step"), int) else None


def told_in(checkpoint: CheckpointReader, name: str, kind: object, otherwise: T) -> T:
    """What ``checkpoint`` tells as ``name``, of that ``kind``; ``otherwise`` if it tells nothing, or something else."""
    tree = checkpoint.tree if isinstance(checkpoint.tree, dict) else {}
    try:
        found: T = of_kind(kind, tree.get(name, otherwise), name)
    except ValueError:
        return otherwise
    return found


def _steps(found: tuple[Committed, ...]) -> str:
    return ", ".join(str(step) for step in sorted({one.step for one in found}))
