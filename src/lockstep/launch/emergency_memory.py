"""A directory in this host's memory, in which the survivors of a dead rank save the state of the last finished step.

It exists as long as the launcher of this node, so each generation of ranks finds the states of earlier ones. If the
launcher is killed, the fork server removes it; if both are killed, the next launcher on this host does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lockstep.errors import SettingError

#: Where Linux keeps files in memory; a file takes memory only when it is written.
SHARED_MEMORY: Final = Path("/dev/shm")
_PREFIX = "lockstep-emergency-"
_NEW = "lockstep-new-emergency-"  # is not found by `_PREFIX`
_OWNER = "owner"  # locked by the launcher as long as it lives


@contextlib.contextmanager
def emergency_memory(run_dir: Path, root: Path = SHARED_MEMORY) -> Iterator[Path]:
    """A new directory that only this user can read: below ``root``, or below ``run_dir`` if that is not possible.

    It is removed at the end. Directories that killed launchers have left are removed at the beginning.

    Raises:
        SettingError: if neither is possible.
    """
    _remove_left(root)
    try:
        memory, owner = _new_memory(root)
    except OSError:
        try:
            memory, owner = _new_memory(run_dir)
        except OSError as error:
            raise SettingError(
                f"ranks cannot save their last step for a restart: neither {root} nor the run directory takes a new "
                f"directory ({error.strerror})"
            ) from error
    try:
        yield memory
    finally:
        os.close(owner)
        shutil.rmtree(memory, ignore_errors=True)


def _new_memory(place: Path) -> tuple[Path, int]:
    """A new directory in ``place``, and the descriptor that holds its lock; nothing is left in ``place`` if it fails.

    Raises:
        OSError: such as for a file system without room.
    """
    new = Path(tempfile.mkdtemp(prefix=_NEW, dir=place))
    with contextlib.ExitStack() as undo:
        undo.callback(_remove_new, new)
        owner = os.open(new / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        undo.callback(os.close, owner)
        fcntl.flock(owner, fcntl.LOCK_EX)
        # Only now another launcher may find it, which would take one that nobody has locked for left.
        memory = new.rename(new.with_name(new.name.replace(_NEW, _PREFIX, 1)))
        undo.pop_all()
    return memory, owner


def _remove_new(new: Path) -> None:
    # Not by `shutil.rmtree`, which needs a descriptor: that there are no more may be what went wrong.
    with contextlib.suppress(OSError):
        (new / _OWNER).unlink(missing_ok=True)
        new.rmdir()


def _remove_left(root: Path) -> None:
    """Remove the directories of launchers that do not run any more: the kernel has released their locks."""
    found = list[Path]()
    with contextlib.suppress(OSError):
        found += root.glob(f"{_PREFIX}*")
    for memory in found:
        with contextlib.suppress(OSError):
            if not stat.S_ISDIR((about := memory.lstat()).st_mode) or about.st_uid != os.geteuid():
                continue  # another user's, who may have put there what he likes, such as links and pipes
            # A launcher that is just starting has no such file yet.
            owner = os.open(memory / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(memory, ignore_errors=True)
            finally:
                os.close(owner)
