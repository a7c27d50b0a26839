"""What is known of the step that came after a checkpoint: a small file in its directory.

A step that is over before the commit has its file there when the checkpoint becomes visible, so that whatever is killed
then does not lack it. It is not part of what was committed: no manifest names it, it is in no checksum but its own, and
it goes where the directory goes. A checkpoint without it, or with half of it, is as good as any other.
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
    """The leader's writer of this file, for one checkpoint at a time: the one that was begun last.

    The step may be over before the checkpoint is committed, or after that: what comes second writes the file. From any
    thread.

    Args:
        disk: the file system.
    """

    def __init__(self, disk: FileSystem) -> None:
        self._disk: Final = disk
        self._lock: Final = threading.Lock()
        self._scratch: tuple[int, Path] | None = None  # of the one that is being committed
        self._committed: Committed | None = None
        self._waiting: tuple[int, Mapping[str, Any]] | None = None

    def before_commit(self, scratch: Path, step: int) -> None:
        """What is in ``scratch`` is about to become visible, as the checkpoint of ``step``."""
        with self._lock:
            self._scratch = step, scratch
            self._write_early()

    def committed(self, checkpoint: Committed) -> None:
        """``checkpoint`` has become visible."""
        with self._lock:
            self._scratch, self._committed = None, checkpoint
            self._write()

    def put(self, step: int, content: Mapping[str, object]) -> None:
        """``content``, plain values, is known of the step after ``step``. Raises nothing: it is no part of the save."""
        with self._lock:
            self._waiting = step, content
            self._write_early()
            self._write()

    def _write_early(self) -> None:
        # The directory may have its other name by then: then the file is written when that is known.
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
            try:  # not flushed, for the step waits: what a power cut takes of it is not missed
                self._disk.write(file, memoryview(f"{zlib.crc32(text.encode()):08x} {text}".encode()))
            finally:
                self._disk.close(file)


def read_next_step(path: Path, disk: FileSystem) -> dict[str, object] | None:
    """What the checkpoint in ``path`` says of the step after it; None if that is not there, or not in full."""
    try:
        if not 0 <= disk.size(path / NEXT_STEP) <= MOST_BYTES:
            return None
        with disk.reader(path / NEXT_STEP) as file:
            found, _, text = file.read().decode().partition(" ")
        content = value_in(text) if found == f"{zlib.crc32(text.encode()):08x}" else None
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
