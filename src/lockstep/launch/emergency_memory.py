"""A directory in this host's memory, in which the survivors of a dead rank save the state of the last finished step.

It exists as long as the launcher of this node, so each generation of ranks finds the states of earlier ones. If the
launcher is killed, the fork server removes it; if both are killed, the next launcher on this host does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: Where Linux keeps files in memory; a file takes memory only when it is written.
SHARED_MEMORY: Final = Path("/dev/shm")
_PREFIX = "lockstep-emergency-"
_NEW = "lockstep-new-emergency-"  # is not found by `_PREFIX`
_OWNER = "owner"  # locked by the launcher as long as it lives


@contextlib.contextmanager
def emergency_memory(run_dir: Path, root: Path = SHARED_MEMORY) -> Iterator[Path]:
    """A new directory that only this user can read: below ``root``, or below ``run_dir`` if that is not possible.

    It is removed at the end. Directories that killed launchers have left are removed at the beginning.
    """
    _remove_left(root)
    try:
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=root))
    except OSError:
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=run_dir))
    owner = os.open(new / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    memory = new.with_name(new.name.replace(_NEW, _PREFIX, 1))
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        # Only now another launcher may find it, which would take one that nobody has locked for left.
        new.rename(memory)
        yield memory
    finally:
        os.close(owner)
        shutil.rmtree(memory, ignore_errors=True)


def _remove_left(root: Path) -> None:
    """Remove the directories of launchers that do not run any more: the kernel has released their locks."""
    for memory in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            owner = os.open(
                memory / _OWNER, os.O_RDWR | os.O_CLOEXEC
            )  # a launcher that is just starting has no such file yet
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(memory, ignore_errors=True)
            finally:
                os.close(owner)
