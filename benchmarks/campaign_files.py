"""The kinds of faults of the campaign that befall files, disks, memory, limits and the clock of one machine."""

from __future__ import annotations

import errno
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from campaign_faults import (
    KILL,
    SAVED,
    TERM,
    Fault,
    Strike,
    killed_by,
    one_machine,
    signals,
    then_killed,
)
from campaign_training import Training, send, wait_for
from faulty_files import CLOSE, FSYNC, MKDIR, OPEN, READ, RENAME, UNLINK, WRITE

_LIMIT_S = 30.0  #: for a fault to strike, and to be told
_PART, _MANIFEST = ".safetensors", "manifest.json"
_LOGS, _METRICS, _EMERGENCY = "/r/logs/", "metrics.jsonl", "lockstep-emergency"
#: Names that look like newer checkpoints.
_ODD = ("step-88888888", "step-99999999")


def failing(
    calls: int,
    path: str,
    error: int = 0,
    says: str = "",
    *,
    skip: int = 0,
    most: int = -1,
    delay_ms: int = 0,
    part: int = 0,
    hits: int = 1,
) -> Strike:
    """Calls for files fail, come late or are done in part, until so many have been struck and it is told."""

    def strike(training: Training) -> None:
        since, files = training.screens(), training.files()
        files.rule(calls, path, error, skip=skip, most=most, delay_ms=delay_ms, part=part)
        try:
            wait_for(
                lambda: files.hits >= hits and re.search(says, training.said(since)), f"{path} to be struck", _LIMIT_S
            )
        finally:
            files.rule()

    return strike


def unsaved(calls: int, path: str, error: int, *, skip: int = 0, most: int = -1) -> Fault:
    """A save fails, which is told, and the next one does not."""
    return Fault(failing(calls, path, error, _UNSAVED, skip=skip, most=most), _UNSAVED, ends=False)


def unharmed(strike: Strike, says: str = "") -> Fault:
    """What costs nothing."""
    return Fault(strike, says, ends=False)


def clock(ahead_s: int, *, then_kill: bool = False) -> Strike:
    """The wall clock is set for some steps."""

    def strike(training: Training) -> None:
        training.files().rule(clock_s=ahead_s)
        training.wait_for_steps(12)
        if then_kill:
            send(training.rank(), KILL)
            training.wait_for_steps(3)
        training.files().rule()

    return strike


def deaf_status(training: Training) -> None:
    """A pipe that nobody writes, in place of status.json, for a second."""
    status = training.run_dir / "status.json"
    for _ in range(20):
        with suppress(OSError):
            status.unlink(missing_ok=True)
            os.mkfifo(status)
        time.sleep(0.05)


def status_is_a_directory(training: Training) -> None:
    """A directory in place of status.json, for some steps."""
    status = training.run_dir / "status.json"
    status.unlink(missing_ok=True)
    status.mkdir()
    training.wait_for_steps(5)
    status.rmdir()


def until_unsaved(fill: Callable[[Path], object], *, place: str = "fills") -> Strike:
    """The disk of the run directory is full until a save has failed."""

    def strike(training: Training) -> None:
        since, filled = training.screens(), training.run_dir / place
        with suppress(OSError):
            fill(filled)
        wait_for(lambda: "not saved" in training.said(since), "a save that fails")
        for path in training.run_dir.glob(f"{place}*"):
            path.unlink()

    return strike


def bytes_into(file: Path) -> None:
    """Until there is no room."""
    with file.open("wb") as filled:
        while True:
            filled.write(bytes(1 << 16))
            filled.flush()


def names_beside(file: Path) -> None:
    """Until there is no name left."""
    for number in range(100_000):
        file.with_name(f"{file.name}-{number}").touch()


def full_memory(training: Training) -> None:
    """The memory of the host that has files is full, and a rank is killed, which leaves more there."""
    shm = training.machines["n1"].root / "dev" / "shm"
    with suppress(OSError):
        bytes_into(shm / "fills")
    try:
        training.wait_for_steps(3)
        if training.alive:  # loader processes of a script that takes more there end the run, which says why
            send(training.rank(), KILL)
            training.wait_for_steps(3)
    finally:
        (shm / "fills").unlink()


def no_emergency_memory(error: int) -> Strike:
    """What ranks leave when one of them is killed cannot be written, nor what the next ranks keep."""

    def strike(training: Training) -> None:
        files = training.files()
        files.rule(OPEN | WRITE | MKDIR, _EMERGENCY, error)
        send(training.rank(), KILL)
        training.wait_for_steps(3)
        assert files.hits, "nothing was written there"
        files.rule()

    return strike


def unreadable(training: Training) -> None:
    """The parts of checkpoints cannot be read at a resume, twice."""
    _stopped(training)
    training.files().rule(OPEN | READ, _PART, EIO, most=2)


def _whole(training: Training) -> list[Path]:
    return [path for path in training.run_dir.glob("checkpoints/step-*") if (path / _MANIFEST).is_file()]


def _stopped(training: Training) -> None:
    """Kill the launcher, and remove what earlier faults have put beside the checkpoints."""
    send(training.launcher(), KILL)
    wait_for(training.ended, "the end of the launcher")
    wait_for(lambda: not training.machines["n1"].processes(), "the end of its processes")
    for name in _ODD:
        odd = training.run_dir / "checkpoints" / name
        with suppress(FileNotFoundError):
            odd.unlink() if odd.is_symlink() else odd.rmdir()


def damaged(damage: Callable[[Path], object]) -> Fault:
    """The newest checkpoint is damaged while nobody runs who would write another one."""

    def strike(training: Training) -> None:
        wait_for(lambda: len(_whole(training)) > 1, "two checkpoints")
        _stopped(training)
        damage(max(_whole(training)))

    return Fault(strike, _DAMAGED, "older", resumes=True)


def changed(change: Callable[[Path], object], says: str = "") -> Fault:
    """Something else in the run directory is changed while nobody runs; the newest checkpoint is used."""

    def strike(training: Training) -> None:
        _stopped(training)
        change(training.run_dir)

    return Fault(strike, says, "disk", resumes=True)


def refused(says: str, *within: str, mount: str = "", env: dict[str, str] | None = None) -> Fault:
    """It is stopped, started where that cannot work, told why, and started as before."""

    def strike(training: Training) -> None:
        signals(TERM)(training)
        first = training.launchers["n1"]
        wait_for(training.ended, "the end of the launcher")
        since, host = training.screens(), training.machines["n1"]
        if mount:
            host.run("sh", "-c", mount)
        training.launch("n1", "--resume", "--max-restarts", "0", within=within, env=env)
        second, training.launchers["n1"] = training.launchers["n1"], first
        wait_for(lambda: second.poll() is not None, "the end of what cannot work")
        if mount:
            host.run("umount", mount.split()[-1])
        assert second.returncode != 0, "it did work"
        assert re.search(says, training.said(since)), f"not told why: {training.said(since)[-2000:]}"

    return Fault(strike, rf"{SAVED}|{says}|run failed", resumes=True)


def _a_part(checkpoint: Path) -> Path:
    return max((path for path in checkpoint.iterdir() if path.suffix == ".safetensors"), key=lambda p: p.stat().st_size)


def flipped(find: Callable[[Path], Path], at: int) -> Callable[[Path], None]:
    """One bit of a file is another one, so many bytes from its beginning, or from its end if negative.

    A file that is shorter than that is counted round: any of its bits will do.
    """

    def damage(checkpoint: Path) -> None:
        path = find(checkpoint)
        content = bytearray(path.read_bytes())
        content[at % len(content)] ^= 4
        path.write_bytes(content)

    return damage


def shortened(find: Callable[[Path], Path], by: float) -> Callable[[Path], None]:
    """A file lacks its end, or all of it."""
    return lambda checkpoint: os.truncate(path := find(checkpoint), int(path.stat().st_size * (1 - by)))


def torn(path: Path) -> None:
    """The last line of a file lacks its second half."""
    content = path.read_bytes()
    before, last, _ = content.rpartition(content.splitlines(keepends=True)[-1])
    os.truncate(path, len(before) + len(last) // 2)


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else in place of a part."""

    def damage(checkpoint: Path) -> None:
        part = _a_part(checkpoint)
        part.unlink()
        make(part)

    return damage


def swapped(checkpoint: Path) -> None:
    """A part is that of another checkpoint."""
    other = min(checkpoint.parent.glob("step-*"))
    _a_part(checkpoint).write_bytes(_a_part(other).read_bytes())


def _manifest(checkpoint: Path) -> Path:
    return checkpoint / "manifest.json"


def linked(run_dir: Path) -> None:
    """An older checkpoint under a higher number."""
    (run_dir / "checkpoints" / _ODD[0]).symlink_to(min(run_dir.glob("checkpoints/step-*")).name)


def stale(run_dir: Path) -> None:
    """What saves and removals leave that were cut off."""
    for name in (".saving-00000007", ".removing-00000003"):
        (run_dir / "checkpoints" / name / "inner").mkdir(parents=True)


def checkpoints_gone(training: Training) -> None:
    """Somebody moves the checkpoints away."""
    # To a name of its own, since a training may be struck so twice.
    (training.run_dir / "checkpoints").rename(tempfile.mkdtemp(prefix="moved-", dir=training.run_dir))


def logs_gone(training: Training) -> None:
    """Somebody removes the logs."""
    for log in (training.run_dir / "logs").iterdir():
        log.unlink()
    (training.run_dir / "logs").rmdir()


_UNSAVED = r"not saved: "
_DAMAGED = r"DAMAGED checkpoint of step \d+.*Falling back to the one before"
_KILLED = killed_by(KILL)
#: Or the newest checkpoint holds the last finished step, and nothing is to be left.
_NOT_LEFT = r"(?s)run failed: .*killed by SIGKILL.*(left no state|in memory|not mirrored any more)"
EIO, ENOSPC = errno.EIO, errno.ENOSPC

FILES: dict[str, Fault] = {
    "EIO where a part is written": unsaved(WRITE, _PART, EIO),
    "EIO where a part is flushed": unsaved(FSYNC, _PART, EIO),
    "EIO where a directory is flushed": unsaved(FSYNC, "/checkpoints/", EIO),
    "ENOSPC at the third write of a save": unsaved(WRITE, "/checkpoints/", ENOSPC, skip=2),
    "EDQUOT where a manifest is written": unsaved(WRITE, _MANIFEST, errno.EDQUOT),
    "EROFS where checkpoints are opened": unsaved(OPEN, ".saving-", errno.EROFS),
    "EMFILE where checkpoints are opened": unsaved(OPEN, ".saving-", errno.EMFILE),
    "EACCES where a checkpoint's directory is made": unsaved(MKDIR, ".saving-", errno.EACCES),
    "EIO where a checkpoint is committed": unsaved(RENAME, "/step-", EIO),
    "a commit takes 2 s": unharmed(failing(RENAME, "/step-", delay_ms=2000)),
    "a flush takes 2 s": unharmed(failing(FSYNC, _PART, delay_ms=2000)),
    "writes are done in part": unharmed(failing(WRITE, "/r/", part=7, hits=100)),
    "writes are interrupted": unharmed(failing(WRITE, "/r/", errno.EINTR, most=40, hits=40)),
    "EIO where a part is closed": unharmed(failing(CLOSE, _PART, EIO)),
    "EIO where an old checkpoint is removed": unharmed(failing(UNLINK, _PART, EIO)),
    "EIO where metrics are written": unharmed(failing(WRITE, _METRICS, EIO, r"metrics are not recorded in")),
    "ENOSPC where logs are written": unharmed(
        failing(WRITE, _LOGS, ENOSPC, r"logs cannot be written"), r"logs cannot be written"
    ),
    "EIO where the status is written": unharmed(failing(WRITE, "status", EIO, hits=3)),
    "ENOSPC in emergency memory, and kill -9 of a rank": Fault(no_emergency_memory(ENOSPC), _NOT_LEFT, "disk"),
    "EIO in emergency memory, and kill -9 of a rank": Fault(no_emergency_memory(EIO), _NOT_LEFT, "disk"),
    "the wall clock is 3 days ahead": unharmed(clock(3 * 86400)),
    "the wall clock is 6 days behind": unharmed(clock(-6 * 86400)),
    "the wall clock is in 1971, and kill -9 of a rank": Fault(
        clock(365 * 86400 - int(time.time()), then_kill=True), _KILLED
    ),
    "the wall clock is in 2100, and kill -9 of a rank": Fault(
        clock(130 * 365 * 86400 - int(time.time()), then_kill=True), _KILLED
    ),
    "status.json does not answer, and kill -9 of a rank": Fault(then_killed(deaf_status), _KILLED),
    "status.json is a directory": unharmed(status_is_a_directory),
    "the disk is full": Fault(until_unsaved(bytes_into), r"not saved: .* is full", ends=False),
    "the disk has no names left": Fault(until_unsaved(names_beside), r"not saved: .*", ends=False),
    "the memory for files is full, and kill -9 of a rank": Fault(
        full_memory, rf"{_KILLED}|run failed: [^✗]*(/dev/shm|No space left)", "disk", resumes=True
    ),
    "the checkpoints are gone, and kill -9 of a rank": Fault(then_killed(checkpoints_gone), _KILLED),
    "the logs are gone, and kill -9 of a rank": Fault(then_killed(logs_gone), _KILLED),
}
_OPEN_FILES = r"a process may open \d+ files here"
BETWEEN: dict[str, Fault] = {
    "a byte of the newest checkpoint is another one": damaged(flipped(_a_part, -3)),
    "a bit of a part's head is another one": damaged(flipped(_a_part, 20)),
    "a bit of the manifest is another one": damaged(flipped(_manifest, 200)),
    "the newest checkpoint is cut short": damaged(shortened(_a_part, 0.5)),
    "the manifest is empty": damaged(shortened(_manifest, 1.0)),
    "a pipe in the newest checkpoint": damaged(replaced(os.mkfifo)),
    "a directory in place of a part": damaged(replaced(os.mkdir)),
    "a link to a device in place of a part": damaged(replaced(lambda part: os.symlink("/dev/zero", part))),
    "a part is that of another checkpoint": damaged(swapped),
    "an empty checkpoint with a higher number": changed(
        lambda run_dir: (run_dir / "checkpoints/step-99999999").mkdir()
    ),
    "an older checkpoint under a higher number": changed(linked),
    "what cut-off saves leave": changed(stale),
    "the last line of the metrics is torn": changed(lambda run_dir: torn(run_dir / _METRICS)),
    "a bit of the metrics is another one": changed(flipped(lambda run_dir: run_dir / _METRICS, 20)),
    "EIO where a part is read at a resume": Fault(
        unreadable,
        r"(?si)run failed: .*input/output error",
        "older",
        resumes=True,
        happened=lambda training: training.files().hits > 0,
    ),
    "12 open files at most": refused(_OPEN_FILES, "prlimit", "--nofile=12"),
    "24 open files at most": refused(_OPEN_FILES, "prlimit", "--nofile=24"),
    "700 MB of addresses at most": refused(r"(?i:memory)", "prlimit", "--as=700000000"),
    "4 kB of memory for files": refused(r"/dev/shm", mount="mount -t tmpfs -o size=4k none /dev/shm"),
    "memory for files that takes nothing": refused(r"/dev/shm", mount="mount -t tmpfs -o ro none /dev/shm"),
}
GROUPS = {
    "files": one_machine(FILES, most=8, needs=("cc",)),
    "files between two starts": one_machine(BETWEEN, most=8, needs=("cc",)),
}
