"""The record of the step that came after a checkpoint: a small file in the checkpoint's directory.

If the step is over before the commit, its file is in the directory when the checkpoint becomes visible, so that a run
killed then has the record. The file is no part of the committed checkpoint: no manifest names it, only its own checksum
covers it, and it is moved with the directory. A checkpoint without the file, or with half of it, is as good as any
other.
"""

from __future__ import annotations

import contextlib
import json
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lockstep.checkpoint.commit import Committed
from lockstep.checkpoint.filesystem import FileSystem
from lockstep.records import MOST_BYTES, value_in

NEXT_STEP: Final = "next-step.json"


class NextStepFile:
    """The leader's writer of the record, for one checkpoint at a time: the checkpoint begun last.

    The step may be over before or after the commit of the checkpoint: the later event writes the file. Methods may be
    called from any thread.

    Args:
        disk: the file system.
    """

    def __init__(self, disk: FileSystem) -> None:
        self._disk: Final = disk
        self._lock: Final = threading.Lock()
        self._scratch: tuple[int, Path] | None = None  # of the checkpoint that is being committed
        self._committed: Committed | None = None
        self._waiting: tuple[int, Mapping[str, Any]] | None = None

    def before_commit(self, scratch: Path, step: int) -> None:
        """Note that ``scratch`` is about to become visible, as the checkpoint of ``step``."""
        with self._lock:
            self._scratch = step, scratch
            self._write_early()

    def committed(self, checkpoint: Committed) -> None:
        """Note that ``checkpoint`` has become visible."""
        with self._lock:
            self._scratch, self._committed = None, checkpoint
            self._write()

    def put(self, step: int, content: Mapping[str, object]) -> None:
        """Write ``content``, plain values, as the record of the step after ``step``. Never raises."""
        with self._lock:
            self._waiting = step, content
            self._write_early()
            self._write()

    def _write_early(self) -> None:
        # The directory may have been renamed by then: then the file is written in `committed`.
        if self._waiting is not None and self._scratch is not None and self._waiting[0] == self._scratch[0]:
            self._write_into(self._scratch[1], self._waiting[1])

    def _write(self) -> None:
        if self._waiting is None or self._committed is None or self._waiting[0] != self._committed.step:
            return
        self._write_into(self._committed.path, self._waiting[1])
        self._waiting = None

    def _write_into(self, directory: Path, content: Mapping[str, object]) -> None:
        text = json.dumps(content, separators=(",", ":"))
        path = directory / NEXT_STEP
        with contextlib.suppress(OSError):
            if NEXT_STEP in self._disk.names(directory):
                if read_next_step(directory, self._disk) == json.loads(text):
                    return
                self._disk.unlink(path)
            file = self._disk.create(path)
            try:  # not flushed, since the step waits; a record lost in a power cut is not needed
                self._disk.write(file, memoryview(f"{zlib.crc32(text.encode()):08x} {text}".encode()))
            finally:
                self._disk.close(file)


def read_next_step(path: Path, disk: FileSystem) -> dict[str, object] | None:
    """The record of the step after the checkpoint in ``path``; None if missing or incomplete."""
    try:
        if not 0 <= disk.size(path / NEXT_STEP) <= MOST_BYTES:
            return None
        with disk.reader(path / NEXT_STEP) as file:
            found, _, text = file.read().decode().partition(" ")
        content = value_in(text) if found == f"{zlib.crc32(text.encode()):08x}" else None
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
