"""The run's own record of metrics, and the line in which the user sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from lockstep.report import MetricsFile


class RunLog:
    """Written by the leader; the others write and say nothing.

    Args:
        leads: whether this rank is the leader.
        directory: where ``metrics.jsonl`` is written; None: nowhere.
        say: prints one line.
    """

    def __init__(self, leads: bool, directory: str | None, say: Callable[[str], None]) -> None:
        self._leads: Final = leads
        self._directory: Final = directory
        self._say: Final = say
        self._file: MetricsFile | None = None

    def open(self, step: int) -> None:
        """The run goes on from ``step``; what the file says of later steps is removed."""
        if self._leads and self._directory:
            self._file = MetricsFile(Path(self._directory, "metrics.jsonl"), step=step, say=self._say)

    def write(self, values: dict[str, object], step: int, epoch: int) -> None:
        """Write ``values`` to the file, if there is one, and tell the user.

        Args:
            values: by name.
            step: steps done.
            epoch: the epoch in work, from 1; a value named ``epoch`` takes its place.
        """
        if not self._leads:
            return
        if self._file is not None:
            self._file.write(step, epoch, values)
        texts = (f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in ({"epoch": epoch} | values).items())
        self._say(f"step {step}: " + ", ".join(texts))

    def close(self) -> None:
        """The file is closed."""
        if self._file is not None:
            self._file.close()
