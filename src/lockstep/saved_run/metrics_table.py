"""What a run has logged, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import SettingError
from lockstep.report import MetricsFile
from lockstep.saved_run.located import RunPath

if TYPE_CHECKING:
    from pandas import DataFrame


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
