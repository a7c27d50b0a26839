"""Files that fail and a clock that is wrong, for processes that are started with a small library (`faulty_files.c`).

What is to happen lies in a file that all these processes have mapped, so that it holds at once, for all of them.
"""

from __future__ import annotations

import functools
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

#: Calls, as `faulty_files.c` numbers them.
OPEN, WRITE, FSYNC, RENAME, MKDIR, UNLINK, READ, CLOSE = (1 << bit for bit in range(8))
_FORMAT = "6iqi256s"
_RULE = struct.Struct(f"@{_FORMAT}")
_HITS_AT = struct.calcsize("@6iq")
_SIZE = 4096


@functools.cache
def library() -> Path | None:
    """The library, compiled for as long as this process lives; None where there is no C compiler.

    Raises:
        CalledProcessError: if it cannot be compiled.
    """
    if shutil.which("cc") is None:
        return None
    kept = tempfile.TemporaryDirectory(prefix="faulty-files-")
    _KEPT.append(kept)
    source, made = Path(__file__).with_suffix(".c"), Path(kept.name, "faulty_files.so")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    return made


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


class FaultyFiles:
    """What happens to the files and the clock of processes that are started with `env`; at first nothing.

    Args:
        control: the file that they map; made.
    """

    def __init__(self, control: Path) -> None:
        self._control = control
        if not control.exists():
            control.write_bytes(bytes(_SIZE))

    @property
    def env(self) -> dict[str, str]:
        """Environment variables for processes."""
        made = library()
        return {} if made is None else {"LD_PRELOAD": str(made), "FAULTY_FILES": str(self._control)}

    def rule(
        self,
        calls: int = 0,
        path: str = "",
        error: int = 0,
        *,
        skip: int = 0,
        most: int = -1,
        delay_ms: int = 0,
        part: int = 0,
        clock_s: int = 0,
    ) -> None:
        """From now on, in place of what held before; without arguments, nothing happens any more.

        Args:
            calls: which calls for files.
            path: is contained in the path of these files.
            error: with which they fail; 0: they do not.
            skip: so many calls are left alone first.
            most: so many are struck; negative: all.
            delay_ms: they come so late.
            part: so many bytes at most are written or read at once; 0: all.
            clock_s: the wall clock is ahead by so much.
        """
        with self._control.open("r+b") as control:
            control.write(bytes(4))  # no call is struck by half of a rule
            control.flush()
            control.seek(0)
            control.write(_RULE.pack(calls, error, skip, most, delay_ms, part, clock_s, 0, os.fsencode(path)))

    @property
    def hits(self) -> int:
        """How many calls the rule has met."""
        found: int = struct.unpack_from("@i", self._control.read_bytes(), _HITS_AT)[0]
        return found
