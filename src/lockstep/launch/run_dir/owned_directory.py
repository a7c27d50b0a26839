"""Directories of a launcher's own, removed at its end; those of a launcher that was killed, by the next one.

    lockstep-AbC123/           in the directory for temporary files: the socket of the ranks, and
        owner                  locked by the launcher as long as it lives: the kernel releases what is locked
        processes-4026531836/  by their namespace: the ranks, and the processes that they have copied themselves into
            4711
    lockstep-emergency-XyZ/    what survivors leave: in memory, or in the run directory where that takes none
        owner

Also removed are segments of shared memory that torch has left: its name for one begins with the process that made it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from lockstep.errors import SettingError
from lockstep.launch.host.procfs import state
from lockstep.launch_contract import PRIVATE

#: Where Linux keeps files in memory; a file takes memory only when it is written.
SHARED_MEMORY: Final = Path("/dev/shm")
_NEW: Final = "new-"  # is found by nobody
_OWNER: Final = "owner"
_PROCESSES: Final = "processes-"
_OF_TORCH: Final = "torch_"
_EMERGENCY: Final = f"{PRIVATE}emergency-"


def new_owned_directory(place: Path, prefix: str) -> tuple[Path, int]:
    """A new directory in ``place`` that only this user can read, and the descriptor that holds its lock.

    Nothing is left in ``place`` if it fails.

    Raises:
        OSError: such as for a file system without room.
    """
    new = Path(tempfile.mkdtemp(prefix=_NEW + prefix, dir=place))
    with contextlib.ExitStack() as undo:
        undo.callback(_remove_new, new)
        owner = os.open(new / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        undo.callback(os.close, owner)
        fcntl.flock(owner, fcntl.LOCK_EX)
        # Only now another launcher may find it, which would take one that nobody has locked for left.
        owned = new.rename(new.with_name(new.name.removeprefix(_NEW)))
        undo.pop_all()
    return owned, owner


def remove_owned_directory(owned: Path, owner: int | None = None) -> None:
    """Remove it with what ended processes have left in shared memory; ``owner`` is its lock, if that is held here."""
    if owner is not None:
        os.close(owner)
    _remove_segments(owned / f"{_PROCESSES}{_namespace()}")
    shutil.rmtree(owned, ignore_errors=True)


def note_process(owned: Path) -> None:
    """This process, and all copies of itself that Python makes, may leave segments of shared memory behind."""

    def note() -> None:
        with contextlib.suppress(OSError):
            (processes / str(os.getpid())).touch()

    with contextlib.suppress(OSError):
        processes = owned / f"{_PROCESSES}{_namespace()}"
        processes.mkdir(exist_ok=True)
        note()
        os.register_at_fork(after_in_child=note)


def remove_left(places: Iterable[Path]) -> None:
    """Remove what launchers of this user that do not run any more have left in ``places``."""
    for place in places:
        found = list[Path]()
        with contextlib.suppress(OSError):
            found += place.glob(f"{PRIVATE}*")
        for owned in found:
            with contextlib.suppress(OSError):
                _remove_if_left(owned)


def _remove_if_left(owned: Path) -> None:
    """Remove ``owned`` if it is this user's, and its lock is free.

    Raises:
        OSError: if it is no such directory, or a launcher lives.
    """
    about = owned.lstat()
    if about.st_uid != os.geteuid() or not stat.S_ISDIR(about.st_mode):
        return
    # Whatever else has such a name has no such file, or may have anything in its place.
    owner = os.open(owned / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_owned_directory(owned)
    finally:
        os.close(owner)


def _remove_segments(processes: Path) -> None:
    """Remove what those of these ``processes`` have left in shared memory that have ended, and nobody uses."""
    with contextlib.suppress(OSError):
        ended = {name for name in os.listdir(processes) if state(int(name)) in ("", "Z", "X")}
        left = [
            segment
            for segment in SHARED_MEMORY.glob(f"{_OF_TORCH}*")
            if segment.name.removeprefix(_OF_TORCH).partition("_")[0] in ended
            and segment.lstat().st_uid == os.geteuid()
        ]
        used = _mapped() if left else ""
        for segment in left:
            if str(segment) not in used:
                segment.unlink(missing_ok=True)


def _mapped() -> str:
    """What all processes of this user have mapped."""
    maps = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            maps.append((process / "maps").read_text())
    return "\n".join(maps)


def _namespace() -> int:
    """Of process numbers: elsewhere, such as in another container, the same ones are those of others."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino
    return 0


def _remove_new(new: Path) -> None:
    # Not by `shutil.rmtree`, which needs a descriptor: that there are no more may be what went wrong.
    with contextlib.suppress(OSError):
        (new / _OWNER).unlink(missing_ok=True)
        new.rmdir()


@contextlib.contextmanager
def emergency_memory(run_dir: Path, root: Path = SHARED_MEMORY) -> Iterator[Path]:
    """A new directory that only this user can read: below ``root``, or below ``run_dir`` if that is not possible.

    In it the survivors of a dead rank save the state of the last finished step. It exists as long as the launcher of
    this node, so each generation of ranks finds the states of earlier ones. If the launcher is killed, the fork server
    removes it; if both are killed, the next launcher on this host does. What killed launchers have left in these places
    is removed at the beginning.

    Raises:
        SettingError: if neither is possible.
    """
    remove_left({root, run_dir})
    try:
        memory, owner = new_owned_directory(root, _EMERGENCY)
    except OSError:
        try:
            memory, owner = new_owned_directory(run_dir, _EMERGENCY)
        except OSError as error:
            raise SettingError(
                f"ranks cannot save their last step for a restart: neither {root} nor the run directory takes a new "
                f"directory ({error.strerror})"
            ) from error
    try:
        yield memory
    finally:
        remove_owned_directory(memory, owner)
