"""What a kind of fault of the campaign is, and the kinds that befall processes of one machine: signals, also in pairs.

A kind is what it does, what must be said then, and how much it may cost. Other kinds: what a rank does to itself
(`campaign_ranks.py`), files and limits (`campaign_files.py`), hosts and the network (`campaign_network.py`).
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from campaign_training import Training, children, send, wait_for

Strike = Callable[[Training], None]
Process = Callable[[Training], int]

#: Who has the last finished step when this happens: other ranks; the host's memory, if the run has a mirror; the disk.
HeldBy = Literal["others", "mirror", "disk", "older"]


@dataclass(frozen=True)
class Fault:
    """One kind."""

    strike: Strike
    #: What the screen must say, a regular expression; "": nobody is left who could say it, or nothing need be said.
    says: str = ""
    held_by: HeldBy = "others"
    ends: bool = True  #: the generation; else the same one goes on
    beside: bool = False  #: torchrun may survive it
    resumes: bool = False  #: the launcher ends with it, and is started again with ``--resume``
    prepare: Strike = lambda training: None  #: what must be there before
    happened: Callable[[Training], bool] = lambda training: True  #: afterwards, where it is not seen at once
    outlived: bool = False  #: all of it is gone at once, and what it leaves is removed by the next start


@dataclass(frozen=True)
class Group:
    """Kinds that strike trainings which are started in one way."""

    kinds: dict[str, Fault]
    lost_after_s: int = 30
    ipv6: bool = False
    takeover: bool = False
    nodes: Sequence[int] = (2, 3, 4)
    ranks: Sequence[int] = (1,)  #: on each node
    strategies: Sequence[tuple[str, bool]] = (("ddp", False),)  #: and whether there is a mirror
    most: int = 4  #: faults of one training
    hang_after_s: int = 60  #: a network that is away for some seconds is no hang
    needs: Sequence[str] = ()  #: programs

    @property
    def lacks(self) -> list[str]:
        """Which of these are not here."""
        return [name for name in self.needs if shutil.which(name) is None]


#: Each is drawn as often as it is here.
EVERY_STRATEGY = (("ddp", False), ("ddp", False), ("ddp", True), ("zero", True))
#: Where ranks hold the same state, and it is compared.
REPLICATED = (("ddp", False), ("ddp", True))


def one_machine(
    kinds: dict[str, Fault],
    *,
    strategies: Sequence[tuple[str, bool]] = EVERY_STRATEGY,
    ranks: Sequence[int] = (2, 3),
    most: int = 12,
    needs: Sequence[str] = (),
) -> Group:
    """Kinds that strike ranks of one host."""
    return Group(kinds, nodes=(1,), ranks=ranks, strategies=strategies, most=most, hang_after_s=20, needs=needs)


def rank(signum: signal.Signals) -> Strike:
    """A rank, drawn, gets ``signum``."""
    return lambda training: send(training.rank(), signum)


def worker(signum: signal.Signals) -> Strike:
    """A loader process, drawn, gets ``signum``."""
    return lambda training: send(training.worker(), signum)


def part(process: Process, signum: signal.Signals) -> Strike:
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


def stop_file(training: Training) -> None:
    """A file STOP in the run directory."""
    (training.run_dir / "STOP").touch()


def second_launcher(training: Training) -> None:
    """Another launcher is told to use the same run directory."""
    first = training.launchers["n1"]
    training.launch("n1", "--resume")
    second, training.launchers["n1"] = training.launchers["n1"], first
    wait_for(lambda: second.poll() is not None, "the end of the second launcher")


def signals(*signums: signal.Signals) -> Strike:
    """The launcher gets these, one after the other, as somebody types them."""

    def strike(training: Training) -> None:
        for number, signum in enumerate(signums):
            if number:
                time.sleep(0.3)
            if not training.ended():
                with suppress(IndexError, TimeoutError):
                    send(children(training.launchers["n1"].pid)[0], signum)

    return strike


def parts_stopped(*then: signal.Signals) -> Strike:
    """The fork server and the store are stopped, and then the launcher is told to end."""

    def strike(training: Training) -> None:
        send(training.fork_server(), signal.SIGSTOP)
        send(training.ranks_store(), signal.SIGSTOP)
        signals(*then)(training)

    return strike


def then_killed(strike: Strike) -> Strike:
    """After ``strike`` a rank, drawn, is killed."""

    def both(training: Training) -> None:
        strike(training)
        send(training.rank(), KILL)

    return both


def together(*blows: tuple[Process, signal.Signals], apart_s: float = 0.0) -> Strike:
    """Several processes get a signal each, so many seconds after each other; a process may get several."""

    def strike(training: Training) -> None:
        found = [(process(training), signum) for process, signum in blows]
        for number, (process, signum) in enumerate(found):
            if number:
                time.sleep(apart_s)
            send(process, signum)

    return strike


def everything(*signums: signal.Signals, apart_s: float = 0.0) -> Strike:
    """Every process on the host gets these, as a service manager or a scheduler sends them."""

    def strike(training: Training) -> None:
        for number, signum in enumerate(signums):
            if number:
                time.sleep(apart_s)
            for process in training.machines["n1"].processes():
                send(process, signum)
            if signum == CONT:
                training.launchers["n1"].send_signal(CONT)

    return strike


def for_a_while(process: Process, stop: signal.Signals, seconds: float) -> Strike:
    """A process is stopped for so long."""

    def strike(training: Training) -> None:
        found = process(training)
        os.kill(found, stop)
        time.sleep(seconds)
        # What has entered the host for it is stopped with it.
        training.launchers["n1"].send_signal(CONT)
        send(found, CONT)

    return strike


def storm(training: Training) -> None:
    """Three hundred signals that mean nothing to the launcher and its fork server."""
    for process in (training.launcher(), training.fork_server()):
        for signum in (signal.SIGCHLD, CONT, signal.SIGWINCH) * 50:
            os.kill(process, signum)


def two_ranks(*signums: signal.Signals, apart_s: float = 0.0) -> Strike:
    """Two ranks get a signal each; another one is left."""

    def strike(training: Training) -> None:
        first, second = training.draw.sample(training.ranks(), 2)
        together((lambda _: first, signums[0]), (lambda _: second, signums[1]), apart_s=apart_s)(training)

    return strike


KILL, STOP, TERM, INT, HUP = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGHUP
CONT, QUIT = signal.SIGCONT, signal.SIGQUIT
RANK = r"run failed: (ranks? [\d, -]+|all \d ranks)"
SAVED = r"stopped with a complete checkpoint"
FORK_SERVER = r"the fork server, which starts the ranks, was "
STORE = r"the store where the ranks meet was "


def killed_by(signum: int) -> str:
    """That a rank, or several, were killed by that signal."""
    name = signal.Signals(signum).name if signum in set(signal.Signals) else f"(SIGRTMIN|signal {signum})"
    return RANK + rf".*w(as|ere) killed by {name}"


#: Signals that end a process which does not handle them, and by which none is asked to stop.
_DEADLY = (
    *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGSYS, signal.SIGTRAP, signal.SIGIO, signal.SIGPWR),
    *(signal.SIGSTKFLT, signal.SIGILL, signal.SIGFPE, signal.SIGRTMIN),
)
_ASKS_TO_STOP = (HUP, QUIT, INT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
#: Python, or that ranks are no terminal's, lets ranks ignore them.
_IGNORED = (signal.SIGTTOU, signal.SIGTSTP, signal.SIGTTIN, signal.SIGPIPE, signal.SIGXFSZ)

PROCESSES: dict[str, Fault] = {
    "kill -9 of a rank": Fault(rank(KILL), killed_by(KILL), beside=True),
    "SIGSEGV of a rank": Fault(rank(signal.SIGSEGV), killed_by(signal.SIGSEGV), beside=True),
    "SIGBUS of a rank": Fault(rank(signal.SIGBUS), killed_by(signal.SIGBUS), beside=True),
    "SIGSTOP of a rank": Fault(rank(STOP), RANK + r".*hung"),
    "SIGTERM to a rank": Fault(rank(TERM), r"SIGTERM to rank \d", resumes=True),
    **{f"{signum.name} of a rank": Fault(rank(signum), killed_by(signum)) for signum in _DEADLY},
    **{f"{signum.name} to a rank": Fault(rank(signum), SAVED, resumes=True) for signum in _ASKS_TO_STOP},
    **{f"{signum.name} to a rank": Fault(rank(signum), ends=False) for signum in _IGNORED},
    "a rank is stopped for 5 s": Fault(for_a_while(Training.rank, STOP, 5.0), ends=False),
    "kill -9 of all ranks": Fault(all_ranks, killed_by(KILL), "mirror", beside=True),
    "kill -9 of a rank, and of the next one at its start": Fault(rank_twice, killed_by(KILL)),
    "kill -9 of a loader process": Fault(worker(KILL), r"(?s)run failed: rank.*(worker|loader)", beside=True),
    "SIGSEGV of a loader process": Fault(worker(signal.SIGSEGV), r"(?s)run failed: rank.*(worker|loader)", beside=True),
    "SIGSTOP of a loader process": Fault(worker(STOP), RANK + r".*hung"),
    "kill -9 of the ranks' store": Fault(
        part(Training.ranks_store, KILL), "run failed: " + STORE + "killed by SIGKILL"
    ),
    "SIGSTOP of the ranks' store": Fault(part(Training.ranks_store, STOP), STORE + "stopped", ends=False),
    "SIGTERM to the ranks' store": Fault(part(Training.ranks_store, TERM), ends=False),
    "kill -9 of the fork server": Fault(
        part(Training.fork_server, KILL), "run failed: " + FORK_SERVER + "killed by SIGKILL", "mirror"
    ),
    "SIGSTOP of the fork server": Fault(part(Training.fork_server, STOP), FORK_SERVER + "stopped", ends=False),
    "SIGTERM to the fork server": Fault(part(Training.fork_server, TERM), ends=False),
    "kill -9 of the launcher": Fault(signals(KILL), "", "disk", resumes=True),
    "SIGSEGV of the launcher": Fault(signals(signal.SIGSEGV), "", "disk", resumes=True),
    "SIGABRT of the launcher": Fault(signals(signal.SIGABRT), "", "disk", resumes=True),
    "SIGALRM of the launcher": Fault(signals(signal.SIGALRM), "", "disk", resumes=True),
    "SIGPIPE to the launcher": Fault(signals(signal.SIGPIPE), ends=False),
    "SIGSTOP of the launcher for 6 s": Fault(for_a_while(Training.launcher, STOP, 6.0), ends=False),
    "Ctrl-Z, and fg 5 s later": Fault(for_a_while(Training.launcher, signal.SIGTSTP, 5.0), ends=False),
    "a storm of signals to the launcher": Fault(storm, ends=False),
    "SIGTERM to the launcher": Fault(signals(TERM), SAVED, resumes=True),
    "SIGHUP to the launcher": Fault(signals(HUP), SAVED, resumes=True),
    "Ctrl-C": Fault(signals(INT), SAVED, resumes=True),
    "Ctrl-C twice": Fault(signals(INT, INT), rf"stopped by Ctrl-C, without|{SAVED}", "disk", resumes=True),
    "its parts stopped, then SIGTERM": Fault(parts_stopped(TERM), rf"stopped by SIGTERM|{SAVED}", resumes=True),
    "its parts stopped, then Ctrl-C three times": Fault(
        parts_stopped(INT, INT, INT), rf"stopped by Ctrl-C|{SAVED}", "disk", resumes=True
    ),
    "its parts stopped, then kill -9 of the launcher": Fault(parts_stopped(KILL), "", "disk", resumes=True),
    "a second launcher in the run directory": Fault(second_launcher, r"another (lockstep|launcher)", ends=False),
    "a file STOP": Fault(stop_file, r"found .*STOP", resumes=True),
}

_LAUNCHER, _RANK = Training.launcher, Training.rank
PAIRS: dict[str, Fault] = {
    "kill -9 of two of three ranks at once": Fault(two_ranks(KILL, KILL), killed_by(KILL)),
    "kill -9 of two of three ranks within 50 ms": Fault(two_ranks(KILL, KILL, apart_s=0.05), killed_by(KILL)),
    "SIGSTOP of two of three ranks": Fault(two_ranks(STOP, STOP), RANK + r".*hung"),
    "kill -9 of a rank, SIGSTOP of another one": Fault(two_ranks(KILL, STOP), killed_by(KILL)),
    "kill -9 of the launcher and of a rank": Fault(
        together((_LAUNCHER, KILL), (_RANK, KILL)), "", "disk", resumes=True
    ),
    "kill -9 of a rank, and of the launcher 10 ms later": Fault(
        together((_RANK, KILL), (_LAUNCHER, KILL), apart_s=0.01), "", "disk", resumes=True
    ),
    "kill -9 of a rank and of the fork server": Fault(
        together((Training.fork_server, KILL), (_RANK, KILL)),
        rf"run failed: {FORK_SERVER}killed by SIGKILL|{killed_by(KILL)}",
        "mirror",
    ),
    "kill -9 of a rank and of the ranks' store": Fault(
        together((Training.ranks_store, KILL), (_RANK, KILL)),
        rf"run failed: {STORE}killed by SIGKILL|{killed_by(KILL)}",
    ),
    "SIGTERM twice within 10 ms": Fault(
        together((_LAUNCHER, TERM), (_LAUNCHER, TERM), apart_s=0.01), SAVED, resumes=True
    ),
    "SIGTERM and Ctrl-C within 10 ms": Fault(
        together((_LAUNCHER, TERM), (_LAUNCHER, INT), apart_s=0.01),
        rf"stopped by (SIGTERM|Ctrl-C), without|{SAVED}",
        "disk",
        resumes=True,
    ),
    "SIGTERM to the launcher, kill -9 of a rank 10 ms later": Fault(
        together((_LAUNCHER, TERM), (_RANK, KILL), apart_s=0.01), rf"{SAVED}|{killed_by(KILL)}", resumes=True
    ),
    "kill -9 of a rank, SIGTERM to the launcher 100 ms later": Fault(
        together((_RANK, KILL), (_LAUNCHER, TERM), apart_s=0.1), rf"{SAVED}|{killed_by(KILL)}", resumes=True
    ),
    "SIGSTOP of a rank, then SIGTERM to the launcher": Fault(
        together((_RANK, STOP), (_LAUNCHER, TERM)), rf"{SAVED}|stopped by SIGTERM|{RANK}.*hung", resumes=True
    ),
    "every process is stopped for 5 s": Fault(everything(STOP, CONT, apart_s=5.0), ends=False),
    "SIGTERM to every process": Fault(everything(TERM), SAVED, resumes=True),
    "SIGHUP to every process": Fault(everything(HUP), SAVED, resumes=True),
    "SIGINT to every process": Fault(everything(INT), SAVED, resumes=True),
    "SIGQUIT to every process": Fault(everything(QUIT), SAVED, resumes=True),
    "SIGUSR1 to every process": Fault(everything(signal.SIGUSR1), SAVED, resumes=True),
    "kill -9 of every process": Fault(everything(KILL), "", "disk", resumes=True, outlived=True),
}

GROUPS = {"processes": one_machine(PROCESSES), "pairs": one_machine(PAIRS, ranks=(3,))}
