"""The lock of a root of checkpoints: a lock on a file in the root, held as long as a run works in the root.

A POSIX record lock belongs to a process: a forked loader process does not hold it, so the lock is free as soon as its
holder has ended, in whatever way. (A flock belongs to the open file, which a forked process inherits and may keep after
its rank.) The price: closing any other descriptor of the file drops the lock, so a process that holds the lock never
opens the file again. Runs of one process see each other in a table instead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from lockstep.checkpoint.commit import make_directories
from lockstep.checkpoint.filesystem import LOCAL
from lockstep.errors import SettingError
from lockstep.records import from_known, object_from, read_bytes

#: The name of the lock's file in a root. The file is never removed, which would let two runs lock two files of this
#: name.
LOCK_FILE = ".run-lock"
#: How long a holder that is on its way out may take.
_PATIENCE_S = 10.0
_LOOK_EVERY_S = 0.05
_MOST_BYTES = 4096

_table = threading.Lock()
#: By device and inode of a locked file: the holding process, its descriptor, and its name as written in the file.
_held_here: dict[tuple[int, int], tuple[int, int, bytes]] = {}


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that works in a root, as named in the lock file."""

    host: str
    process: int
    job: str = ""  #: unique name of a launcher's job; "" without a job
    generation: int = 0  #: of that job

    @classmethod
    def here(cls, job: str = "", generation: int = 0) -> Self:
        """The holder for this process."""
        return cls(socket.gethostname(), os.getpid(), job, generation)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The holder named in ``path``; None if the holder has not written its name yet, or could not."""
        try:
            return cls.parse(read_bytes(path))
        except (OSError, ValueError):
            return None

    @classmethod
    def parse(cls, text: bytes) -> Self | None:
        """The holder named in ``text``; None if no holder is named."""
        try:
            return from_known(cls, object_from(text))
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    def is_before(self, other: Holder) -> bool:
        """Whether this holder is of an earlier generation of the same job, which its launcher has ended, or will."""
        return self.job == other.job != "" and self.generation < other.generation

    @property
    def is_gone(self) -> bool:
        """Whether this holder ran on this host and has ended, so that its lock will be free in a moment."""
        if self.host != socket.gethostname():
            return False
        try:
            stat = Path(f"/proc/{self.process}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return True
        return stat.rpartition(")")[2].split()[0] in "ZX"


def lock_root(
    root: Path,
    me: Holder,
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> contextlib.ExitStack:
    """Lock ``root`` for this run, until the returned stack is closed or this process ends.

    Waits up to 10 s for a holder that is ending. If the root cannot be made, or the file system has no locks, no lock
    is held.

    Raises:
        SettingError: if another run, of this or another process, works in the root.
    """
    path = root / LOCK_FILE
    with _table:
        if _holds(path):
            raise SettingError(
                f"checkpoint={str(root)!r} is in use by another Run of this process ({me}): close that one first, by "
                "`with lockstep.Run(...) as run:`, or give each a directory of its own"
            )
        try:
            make_directories(root, LOCAL)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return contextlib.ExitStack()  # a save there will say why it fails
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, file)
            if not _lock(file, path, me, say, clock, sleep):
                return contextlib.ExitStack()
            undo.pop_all()
        return _hold(file, me)


def superseded_by(root: Path) -> str:
    """The run that has taken ``root`` over from this process, which must not change the root any more.

    This happens to a process that slept with its host for so long that its job went on elsewhere. "" if no run has, or
    this process holds no lock. The file is not opened.
    """
    with _table:
        try:
            process, file, name = _held_here.get(_key(os.stat(root / LOCK_FILE)), (0, 0, b""))
            found = os.pread(file, _MOST_BYTES, 0) if process == os.getpid() else name
        except OSError:
            return ""
    if found == name or not name:
        return ""
    holder = Holder.parse(found)
    return "another run" if holder is None else f"generation {holder.generation} of this job ({holder})"


def _holds(path: Path) -> bool:
    """Whether this process holds the lock on ``path``; the file is not opened."""
    try:
        return _held_here.get(_key(os.stat(path)), (0, 0, b""))[0] == os.getpid()
    except OSError:
        return False


def _lock(
    file: int,
    path: Path,
    me: Holder,
    say: Callable[[str], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    """Lock ``file``, or find that its holder was given up; False if the file system has no locks."""
    deadline_s = clock() + _PATIENCE_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                say(f"{path} cannot be locked ({error.strerror}): make sure that no other run uses this directory")
                return False
        holder = Holder.read(path)
        leaves = holder is None or holder.is_gone or holder.is_before(me)
        if not leaves or clock() > deadline_s:
            break
        sleep(_LOOK_EVERY_S)
    if holder is not None and holder.is_before(me):
        # The holder's node may have died with the lock on a file server. The launcher knows that the holder's
        # generation is over; a holder that has only slept reads our name in the file: see `superseded_by`.
        say(f"{path} is still locked by generation {holder.generation} of this job ({holder}): going on without a lock")
        return True
    who = holder or "a process that does not say its name"
    raise SettingError(
        f"checkpoint={str(path.parent)!r} is in use by another run, {who}: two runs in one directory would remove "
        "each other's checkpoints. Wait for it or stop it, or give another directory; if that process is surely gone, "
        f"remove {path}"
    )


def _hold(file: int, me: Holder) -> contextlib.ExitStack:
    key, name = _key(os.fstat(file)), json.dumps(asdict(me)).encode()
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, name, 0)
    except OSError:
        name = b""  # on a full disk the lock is without a name
    _held_here[key] = me.process, file, name
    held = contextlib.ExitStack()
    held.callback(_let_go, file, key, me.process, name)
    return held


def _let_go(file: int, key: tuple[int, int], process: int, name: bytes) -> None:
    if os.getpid() != process:
        return  # a forked copy of the holder, which still runs
    with _table:
        with contextlib.suppress(OSError):
            if os.pread(file, _MOST_BYTES, 0) == name:
                os.ftruncate(file, 0)
        os.close(file)
        del _held_here[key]


def _key(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino
