"""The kinds of faults of the campaign that befall one machine, and one machine of several.

A kind is what it does, what must be said then, and how much it may cost.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from campaign_training import Training, children, send, wait_for

#: Who has the last finished step when this happens: other ranks; the host's memory, if the run has a mirror; the disk.
HeldBy = Literal["others", "mirror", "disk", "older"]


@dataclass(frozen=True)
class Fault:
    """One kind."""

    strike: Callable[[Training], None]
    #: What the screen must say, a regular expression; "": nobody is left who could say it, or nothing need be said.
    says: str = ""
    held_by: HeldBy = "others"
    ends: bool = True  #: the generation; else the same one goes on
    beside: bool = False  #: torchrun may survive it
    resumes: bool = False  #: the launcher ends with it, and is started again with ``--resume``
    prepare: Callable[[Training], None] = lambda training: None  #: what must be there before


def rank(signum: signal.Signals) -> Callable[[Training], None]:
    """A rank, drawn, gets ``signum``."""
    return lambda training: send(training.rank(), signum)


def worker(signum: signal.Signals) -> Callable[[Training], None]:
    """A loader process, drawn, gets ``signum``."""
    return lambda training: send(training.worker(), signum)


def itself(what: str) -> Callable[[Training], None]:
    """A rank, drawn, does ``what`` to itself."""
    return lambda training: training.tell(what)


def part(process: Callable[[Training], int], signum: signal.Signals) -> Callable[[Training], None]:
    """A part of the launcher gets ``signum``."""
    return lambda training: send(process(training), signum)


def all_ranks(training: Training) -> None:
    """All ranks are killed at once."""
    for process in training.ranks():
        send(process, signal.SIGKILL)


def rank_twice(training: Training) -> None:
    """A rank is killed, and one of the next generation as soon as there is one."""
    before = training.ranks()
    send(training.draw.choice(before), signal.SIGKILL)
    new = wait_for(lambda: set(training.machines["n1"].processes()) & set(_new_ranks(training, before)), "a new rank")
    send(min(new), signal.SIGKILL)


def _new_ranks(training: Training, before: list[int]) -> list[int]:
    named = training.machines["n1"].processes().items()
    return [process for process, name in named if name.startswith("rank ") and process not in before]


def deaf_status(training: Training) -> None:
    """A pipe that nobody writes, in place of status.json, for a second, and then a rank dies."""
    status = training.run_dir / "status.json"
    for _ in range(20):
        with suppress(OSError):
            status.unlink(missing_ok=True)
            os.mkfifo(status)
        time.sleep(0.05)
    send(training.rank(), signal.SIGKILL)


def full_disk(training: Training) -> None:
    """The disk of the run directory is full until a save has failed."""
    since = training.screens()
    with suppress(OSError), (training.run_dir / "fills").open("wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    wait_for(lambda: "not saved" in training.said(since), "a save that fails")
    (training.run_dir / "fills").unlink()


def _newest(training: Training) -> Path:
    return max(training.run_dir.glob("checkpoints/step-*"))


def damaged(damage: Callable[[Path], None]) -> Callable[[Training], None]:
    """The newest checkpoint is damaged while nobody runs who would write another one."""

    def strike(training: Training) -> None:
        wait_for(lambda: len(list(training.run_dir.glob("checkpoints/step-*"))) > 1, "two checkpoints")
        send(training.launcher(), signal.SIGKILL)
        wait_for(training.ended, "the end of the launcher")
        wait_for(lambda: not training.machines["n1"].processes(), "the end of its processes")
        damage(_newest(training))

    return strike


def _a_part(checkpoint: Path) -> Path:
    return max((path for path in checkpoint.iterdir() if path.suffix == ".safetensors"), key=lambda p: p.stat().st_size)


def flip(checkpoint: Path) -> None:
    """One byte of a part is another one."""
    with _a_part(checkpoint).open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def shorten(checkpoint: Path) -> None:
    """A part lacks its end."""
    part = _a_part(checkpoint)
    os.truncate(part, part.stat().st_size // 2)


def pipe(checkpoint: Path) -> None:
    """A pipe that nobody writes, in place of a part."""
    part = _a_part(checkpoint)
    part.unlink()
    os.mkfifo(part)


def checkpoints_gone(training: Training) -> None:
    """Somebody moves the checkpoints away, and a rank dies."""
    # To a name of its own, since a training may be struck so twice.
    (training.run_dir / "checkpoints").rename(tempfile.mkdtemp(prefix="moved-", dir=training.run_dir))
    send(training.rank(), signal.SIGKILL)


def logs_gone(training: Training) -> None:
    """Somebody removes the logs, and a rank dies."""
    for log in (training.run_dir / "logs").iterdir():
        log.unlink()
    (training.run_dir / "logs").rmdir()
    send(training.rank(), signal.SIGKILL)


def stop_file(training: Training) -> None:
    """A file STOP in the run directory."""
    (training.run_dir / "STOP").touch()


def second_launcher(training: Training) -> None:
    """Another launcher is told to use the same run directory."""
    first = training.launchers["n1"]
    training.launch("n1", "--resume")
    second, training.launchers["n1"] = training.launchers["n1"], first
    wait_for(lambda: second.poll() is not None, "the end of the second launcher")


def signals(*signums: signal.Signals) -> Callable[[Training], None]:
    """The launcher gets these, one after the other, as somebody types them."""

    def strike(training: Training) -> None:
        for number, signum in enumerate(signums):
            if number:
                time.sleep(0.3)
            if not training.ended():
                with suppress(IndexError, TimeoutError):
                    send(children(training.launchers["n1"].pid)[0], signum)

    return strike


def launcher_stands(training: Training) -> None:
    """The launcher is stopped for six seconds."""
    send(training.launcher(), signal.SIGSTOP)
    time.sleep(6.0)
    # What has entered the host for it is stopped with it.
    training.launchers["n1"].send_signal(signal.SIGCONT)
    send(training.launcher(), signal.SIGCONT)


def parts_stopped(*then: signal.Signals) -> Callable[[Training], None]:
    """The fork server and the store are stopped, and then the launcher is told to end."""

    def strike(training: Training) -> None:
        send(training.fork_server(), signal.SIGSTOP)
        send(training.ranks_store(), signal.SIGSTOP)
        signals(*then)(training)

    return strike


_RANK = r"run failed: (ranks? [\d, ]+|all \d ranks)"
_SAVED = r"stopped with a complete checkpoint"
_DAMAGED = r"DAMAGED checkpoint of step \d+.*Falling back to the one before"
KILL, STOP, TERM, INT, HUP = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGHUP
FORK_SERVER = r"the fork server, which starts the ranks, was "
STORE = r"the store where the ranks meet was "

MACHINE: dict[str, Fault] = {
    "kill -9 of a rank": Fault(rank(KILL), _RANK + r".*w(as|ere) killed by SIGKILL", beside=True),
    "SIGSEGV of a rank": Fault(rank(signal.SIGSEGV), _RANK + r".*w(as|ere) killed by SIGSEGV", beside=True),
    "SIGBUS of a rank": Fault(rank(signal.SIGBUS), _RANK + r".*w(as|ere) killed by SIGBUS", beside=True),
    "SIGSTOP of a rank": Fault(rank(STOP), _RANK + r".*hung"),
    "SIGTERM to a rank": Fault(rank(TERM), r"SIGTERM to rank \d", resumes=True),
    "exception": Fault(itself("raise"), _RANK + r".*raised ValueError", beside=True),
    "more memory than there is": Fault(itself("allocate"), _RANK + r".*raised RuntimeError", beside=True),
    "sys.exit(3)": Fault(itself("sys.exit"), _RANK + r".*left with exit code 3", beside=True),
    "os._exit(5)": Fault(itself("exit"), _RANK + r".*left with exit code 5", beside=True),
    "os.abort": Fault(itself("abort"), _RANK + r".*w(as|ere) killed by SIGABRT", beside=True),
    "endless loop": Fault(itself("loop"), _RANK + r".*hung"),
    "deadlock": Fault(itself("deadlock"), _RANK + r".*hung"),
    "kill -9 of all ranks": Fault(all_ranks, _RANK + r".*w(as|ere) killed by SIGKILL", "mirror", beside=True),
    "kill -9 of a rank, and of the next one at its start": Fault(rank_twice, _RANK + r".*w(as|ere) killed by SIGKILL"),
    "kill -9 of a loader process": Fault(worker(KILL), r"(?s)run failed: rank.*(worker|loader)", beside=True),
    "SIGSEGV of a loader process": Fault(worker(signal.SIGSEGV), r"(?s)run failed: rank.*(worker|loader)", beside=True),
    "SIGSTOP of a loader process": Fault(worker(STOP), _RANK + r".*hung"),
    "kill -9 of the ranks' store": Fault(
        part(Training.ranks_store, KILL), "run failed: " + STORE + "killed by SIGKILL"
    ),
    "SIGSTOP of the ranks' store": Fault(part(Training.ranks_store, STOP), STORE + "stopped", ends=False),
    "kill -9 of the fork server": Fault(
        part(Training.fork_server, KILL), "run failed: " + FORK_SERVER + "killed by SIGKILL", "mirror"
    ),
    "SIGSTOP of the fork server": Fault(part(Training.fork_server, STOP), FORK_SERVER + "stopped", ends=False),
    "kill -9 of the launcher": Fault(signals(KILL), "", "disk", resumes=True),
    "SIGSEGV of the launcher": Fault(signals(signal.SIGSEGV), "", "disk", resumes=True),
    "SIGSTOP of the launcher for 6 s": Fault(launcher_stands, ends=False),
    "SIGTERM to the launcher": Fault(signals(TERM), _SAVED, resumes=True),
    "SIGHUP to the launcher": Fault(signals(HUP), _SAVED, resumes=True),
    "Ctrl-C": Fault(signals(INT), _SAVED, resumes=True),
    "Ctrl-C twice": Fault(signals(INT, INT), rf"stopped by Ctrl-C, without|{_SAVED}", "disk", resumes=True),
    "its parts stopped, then SIGTERM": Fault(parts_stopped(TERM), rf"stopped by SIGTERM|{_SAVED}", resumes=True),
    "its parts stopped, then Ctrl-C three times": Fault(
        parts_stopped(INT, INT, INT), rf"stopped by Ctrl-C|{_SAVED}", "disk", resumes=True
    ),
    "its parts stopped, then kill -9 of the launcher": Fault(parts_stopped(KILL), "", "disk", resumes=True),
    "a second launcher in the run directory": Fault(second_launcher, r"another (lockstep|launcher)", ends=False),
    "a file STOP": Fault(stop_file, r"found .*STOP", resumes=True),
    "status.json does not answer, and kill -9 of a rank": Fault(deaf_status, _RANK + r".*w(as|ere) killed by SIGKILL"),
    "the disk is full": Fault(full_disk, r"not saved: .* is full", ends=False),
    "the checkpoints are gone, and kill -9 of a rank": Fault(
        checkpoints_gone, _RANK + r".*w(as|ere) killed by SIGKILL"
    ),
    "the logs are gone, and kill -9 of a rank": Fault(logs_gone, _RANK + r".*w(as|ere) killed by SIGKILL"),
    "a byte of the newest checkpoint is another one": Fault(damaged(flip), _DAMAGED, "older", resumes=True),
    "the newest checkpoint is cut short": Fault(damaged(shorten), _DAMAGED, "older", resumes=True),
    "a pipe in the newest checkpoint": Fault(damaged(pipe), _DAMAGED, "older", resumes=True),
}
