"""A directory in this host's memory, in which ranks that lose another one leave the state of the last finished step.

It lives as long as this launcher's part of the job: its ranks' generations find there what those before have left. The
fork server removes it, too, for a launcher that is killed; where both are, the next launcher of this host does.
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

#: Where Linux keeps files in memory; they take none until they are written.
SHARED_MEMORY: Final = Path("/dev/shm")
_PREFIX = "lockstep-emergency-"
_NEW = "lockstep-new-emergency-"  # is not found by `_PREFIX`
_OWNER = "owner"  # locked by the launcher as long as it lives


@contextlib.contextmanager
def emergency_memory(run_dir: Path, root: Path = SHARED_MEMORY) -> Iterator[Path]:
    """A new directory that only this user can read; beneath ``root``, or where that cannot be in ``run_dir``.

    It is removed at the end, and so are those of launchers that were killed.
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
    """Remove the directories of this user's launchers that live no more: the kernel has let go of their locks."""
    for memory in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            owner = os.open(memory / _OWNER, os.O_RDWR | os.O_CLOEXEC)  # one that just begins has none yet
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(memory, ignore_errors=True)
            finally:
                os.close(owner)
