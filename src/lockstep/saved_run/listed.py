"""The checkpoints of a run: which, whether they are whole, and which may go; and what it has logged, as a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint import LOCAL, CheckpointReader, Committed, Holder, expired, lock_root, remove, verify
from lockstep.errors import CheckpointError, SettingError
from lockstep.report import MetricsFile
from lockstep.saved_run.located import RunPath, best_of, checkpoints_of, is_whole, told_in

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of one checkpoint, without reading its tensors."""

    name: str
    step: int
    epoch: int | None = None  #: the epoch of its last step, from 1, as `Run.log` writes it
    metrics: dict[str, Any] = field(default_factory=dict)
    size_bytes: int = 0
    age_s: float = 0.0
    best: bool = False  #: by the run's own measure
    strategy: str = ""
    ranks: int | None = None  #: that wrote it
    damaged: str = ""  #: what is wrong, if its files are not all there in full size

    def as_dict(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def rows(run: RunPath, clock: Callable[[], float] = time.time) -> list[Row]:
    """The checkpoints of ``run``, newest first.

    Raises:
        SettingError: if there is none.
    """
    found = checkpoints_of(run)
    best = _best_step(found)
    return [_row(one, best, clock() - one.path.stat().st_mtime) for one in found]


def _row(one: Committed, best: int | None, age_s: float) -> Row:
    try:
        checkpoint = CheckpointReader(one.path)
    except (CheckpointError, OSError) as error:
        return Row(one.path.name, one.step, age_s=age_s, damaged=str(error))
    return Row(
        one.path.name,
        one.step,
        epoch=_epoch(told_in(checkpoint, "progress", dict[str, int], {})),
        metrics=told_in(checkpoint, "metrics", dict[str, Any], {}),
        size_bytes=checkpoint.manifest.total_bytes,
        age_s=age_s,
        best=one.step == best,
        strategy=told_in(checkpoint, "strategy", tuple[str, Any], ("", None))[0],
        ranks=checkpoint.manifest.ranks or None,
    )


def _epoch(progress: Mapping[str, int]) -> int | None:
    epoch = progress.get("epoch")
    return None if epoch is None else epoch + bool(progress.get("epoch_step"))


def check(run: RunPath, step: int | None = None) -> list[tuple[Committed, str]]:
    """Read all checkpoints of ``run``, or those of ``step``, and compare them with their checksums.

    Returns:
        Each with what is wrong with it, empty if it is whole; newest first.

    Raises:
        SettingError: if there is none.
    """
    found = [one for one in checkpoints_of(run) if step in (None, one.step)]
    if not found:
        raise SettingError(f"{run} has no checkpoint of step {step}")
    return [(one, _fault(one)) for one in found]


def _fault(one: Committed) -> str:
    try:
        verify(one.path)
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""


def prune(run: RunPath, keep: int, say: Callable[[str], None], *, really: bool) -> list[Committed]:
    """Which checkpoints go if the newest ``keep`` whole ones stay; with ``really``, they are gone when this returns.

    Kept beside them are the best one, and those that the run itself keeps. What is kept is read and compared with its
    checksums, so that a damaged one never pushes out a good one. Where none is whole, nothing goes.

    Raises:
        SettingError: if there is no checkpoint, ``keep`` is less than 1, or, with ``really``, a run works there.
    """
    if keep < 1:
        raise SettingError(f"--keep {keep}: give a number from 1; the last good checkpoint is never removed")
    found = checkpoints_of(run)
    root = found[0].root
    held = lock_root(root, Holder.here(), say) if really else None
    try:
        gone = _superseded(found, keep)
        if really:
            remove([one.path for one in gone], root, LOCAL)
    finally:
        if held is not None:
            held.close()
    return gone


def _superseded(found: Sequence[Committed], keep: int) -> list[Committed]:
    newest = next((one for one in found if is_whole(one)), None)
    if newest is None:
        return []
    best = _best_step(found)
    protected = CheckpointReader(newest.path).manifest.protected_steps | (set() if best is None else {best})
    return [*expired(found, is_whole, newest, keep, protected - {newest.step})]


def _best_step(found: Sequence[Committed]) -> int | None:
    """The best step that the newest checkpoint which can be read knows of."""
    for one in found:
        try:
            best = best_of(CheckpointReader(one.path))
        except (CheckpointError, OSError):
            continue
        return None if best is None else best["step"]
    return None


def metrics(run: RunPath) -> DataFrame:
    """What ``run`` has logged, as a DataFrame of pandas; the run may still be going on.

    One row for each record, in their order, with the columns ``step``, ``epoch`` (from 1), ``wall_s`` (seconds since
    1970) and one for each name that was logged; nan where a record does not have it. Reads the whole record.

    Args:
        run: a run directory, such as ``runs/NAME``; of a script that was started without the launcher, the directory
            of its checkpoints.

    Raises:
        SettingError: if pandas is not installed, or ``run`` holds no record.
    """
    try:
        from pandas import DataFrame
    except ImportError:
        raise SettingError("metrics are a table of pandas: pip install 'torch-lockstep[notebook]', or pandas") from None
    try:
        return DataFrame(MetricsFile.read(Path(run) / "metrics.jsonl"))
    except OSError as error:
        raise SettingError(
            f"{run} holds no metrics.jsonl that can be read ({error.strerror}); give the directory of a run that has "
            "logged, such as runs/NAME"
        ) from None
