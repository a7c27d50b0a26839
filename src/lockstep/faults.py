"""Fault injection: what is to go wrong, where and when, as text; each rank injects its own faults and records them.

    kill rank 2 at step 7                 once 7 steps are done
    stop rank 1 in backward               SIGSTOP, when it first goes to that phase
    stop rank 1 in backward at step 5     ... in the step after 5 are done
    delay rank 0 by 3 s at step 5
    raise in rank 1 at step 4
    loop in rank 1 in forward             forever, in Python
    fill the disk at step 6               that of the run directory, until the generation ends
    cut the network of node 1 at step 9   inside a network namespace of its own
    kill rank 1 after 5 s                 of its life; for scripts of which no steps are known

A fault happens once: a later generation goes on without it. Steps and phases are those of `Run`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from lockstep.errors import LockstepError, SettingError
from lockstep.heartbeat import ProgressMarker, progress_marker
from lockstep.heartbeat_message import PHASES

FaultKind = Literal["kill", "stop", "delay", "raise", "loop", "fill", "cut"]

_WHAT = (
    r"(?P<kind>kill|stop|raise in|loop in) rank (?P<rank>\d+)|"
    r"(?P<delay>delay) rank (?P<late>\d+) by (?P<by>\d+(?:\.\d+)?) ?s|"
    r"(?P<fill>fill) the disk|(?P<cut>cut) the network of node (?P<node>\d+)"
)
_WHEN = r"(?: in (?P<phase>[a-z]+))?(?: at step (?P<step>\d+))?(?: after (?P<after>\d+(?:\.\d+)?) ?s)?"
_FAULT = re.compile(f"(?:{_WHAT}){_WHEN}")
_EXAMPLES = "such as 'kill rank 1 at step 7', 'stop rank 0 in backward' or 'kill rank 1 after 5 s'"
#: A disk with more free space than this is not a test disk.
_DISK_BYTES = 4 << 30
_BALLAST = "ballast"
_BLOCK_BYTES = 1 << 20
_OWN: Final = progress_marker()


class PlannedFault(LockstepError, RuntimeError):
    """What ``raise in rank 1`` raises."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is to go wrong, once."""

    kind: FaultKind
    rank: int = 0  #: where; of ``fill`` the leader
    node: int = 0  #: of ``cut``, on which its first rank does it
    seconds: float = 0.0  #: of ``delay``
    phase: str | None = None
    step: int | None = None  #: so many steps are done
    after_s: float | None = None  #: since the rank started

    @classmethod
    def parse(cls, text: str) -> Self:
        """The fault that ``text`` describes.

        Raises:
            SettingError: if it is not one.
        """
        words = " ".join(text.split())
        found = _FAULT.fullmatch(words)
        if found is None:
            raise SettingError(f"--fault {text!r}: say what, where and when, {_EXAMPLES}")
        said = found.groupdict()
        if said["phase"] is not None and said["phase"] not in PHASES:
            raise SettingError(f"--fault {text!r}: a rank is in one of the phases {', '.join(PHASES)}")
        if not any(said[name] is not None for name in ("phase", "step", "after")):
            raise SettingError(f"--fault {text!r}: say when: at step N, in PHASE, or after N s")
        if said["after"] is not None and (said["phase"] or said["step"]):
            raise SettingError(f"--fault {text!r}: either after so many seconds, or at a step or phase")
        word = (said["kind"] or said["delay"] or said["fill"] or said["cut"]).split()[0]
        if said["after"] is not None and word in ("delay", "loop"):
            raise SettingError(f"--fault {text!r}: a rank can do that only where it tells where it is: give a step")
        return cls(
            next(kind for kind in _INJECT if kind == word),
            rank=int(said["rank"] or said["late"] or 0),
            node=int(said["node"] or 0),
            seconds=float(said["by"] or 0),
            phase=said["phase"],
            step=None if said["step"] is None else int(said["step"]),
            after_s=None if said["after"] is None else float(said["after"]),
        )

    def __str__(self) -> str:
        """In the words that `parse` reads."""
        what = {
            "delay": f"delay rank {self.rank} by {self.seconds:g} s",
            "fill": "fill the disk",
            "cut": f"cut the network of node {self.node}",
        }.get(self.kind, f"{self.kind}{' in' * (self.kind in ('raise', 'loop'))} rank {self.rank}")
        return (
            what
            + (f" in {self.phase}" if self.phase is not None else "")
            + (f" at step {self.step}" if self.step is not None else "")
            + (f" after {self.after_s:g} s" if self.after_s is not None else "")
        )

    def is_of(self, rank: int, node_rank: int, local_rank: int) -> bool:
        """Whether this rank is to do it."""
        return (node_rank, local_rank) == (self.node, 0) if self.kind == "cut" else rank == self.rank

    def is_due(self, marker: ProgressMarker, *, entered: bool) -> bool:
        """Whether now is the moment: the rank has ``entered`` a phase, or done a step."""
        # The reduction overlaps with the last part of the backward pass.
        there = self.phase == marker.phase or (self.phase, marker.phase) == ("backward", "reduction")
        return (
            self.after_s is None
            and (self.step is None or marker.step >= self.step)
            and (self.phase is None or (entered and there))
        )


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What is to go wrong in one run.

    What has happened is noted in a file, a line for each fault, before it happens: so a rank that is killed has
    noted it, a later generation leaves it out, and the user can see that it did happen.
    """

    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """The plan in ``text``, in which ``;`` or line breaks separate the faults.

        Raises:
            SettingError: for text that describes no fault.
        """
        return cls(tuple(Fault.parse(part) for part in re.split(r"[;\n]", text) if part.strip()))

    def __str__(self) -> str:
        """In the words that `parse` reads."""
        return "; ".join(map(str, self.faults))

    def check(self, *, ranks: int, nodes: int) -> None:
        """Check that a world of this size can have these faults.

        Raises:
            SettingError: for a rank or node that does not exist.
        """
        for fault in self.faults:
            if fault.kind == "cut" and fault.node >= nodes:
                raise SettingError(f"--fault {str(fault)!r}: the nodes are 0 to {nodes - 1}")
            if fault.rank >= ranks:
                raise SettingError(f"--fault {str(fault)!r}: the ranks are 0 to {ranks - 1}")

    def arm(
        self, notes: Path, *, rank: int, node_rank: int = 0, local_rank: int | None = None, of: ProgressMarker = _OWN
    ) -> None:
        """Inject this rank's share of the faults when the main thread reaches their places.

        Call it in the main thread, once. Faults that are in ``notes`` have happened already and are left out.

        Args:
            notes: the file; a disk is filled in its directory.
            rank: this one.
            node_rank: of its node.
            local_rank: on its node; None: as ``rank``.
            of: what the rank tells of where it is.

        Raises:
            SettingError: for a fault that cannot be done here, with what it needs.
        """
        past = set(self.past(notes))
        local = rank if local_rank is None else local_rank
        if rank == 0:
            self.clean(notes)
        mine = [f for f in self.faults if f not in past and f.is_of(rank, node_rank, local)]
        for fault in mine:
            _check_here(fault, notes.parent)
        if mine:
            _Armed(mine, of, notes, rank).begin()

    def past(self, notes: Path) -> tuple[Fault, ...]:
        """Faults that have happened."""
        with contextlib.suppress(FileNotFoundError):
            lines = [line.partition("\t")[0] for line in notes.read_text(encoding="ascii").splitlines()]
            return tuple(fault for fault in self.faults if str(fault) in lines)
        return ()

    def missed(self, notes: Path) -> tuple[Fault, ...]:
        """Faults that have not happened."""
        past = self.past(notes)
        return tuple(fault for fault in self.faults if fault not in past)

    def clean(self, notes: Path) -> None:
        """Remove what the faults have created beside ``notes``; the notes stay."""
        (notes.parent / _BALLAST).unlink(missing_ok=True)

    def assert_happened(self, notes: Path) -> None:
        """Check that all of its faults have happened.

        Raises:
            AssertionError: naming what has not.
        """
        missed = self.missed(notes)
        if missed:
            raise AssertionError(f"never happened: {'; '.join(map(str, missed))}")


class _Armed:
    """The faults of one rank that are still to happen."""

    def __init__(self, faults: Sequence[Fault], marker: ProgressMarker, notes: Path, rank: int) -> None:
        self._left: Final = list(faults)
        self._marker, self._notes, self._rank = marker, notes, rank
        self._main: Final = threading.get_ident()
        self._phase_changes = marker.phase_changes

    def begin(self) -> None:
        self._marker.listeners = (*self._marker.listeners, self._follow)
        for fault in self._left:
            if fault.after_s is not None:
                timer = threading.Timer(fault.after_s, self._do, (fault,))
                timer.daemon = True
                timer.start()

    def _follow(self, marker: ProgressMarker) -> None:
        entered, self._phase_changes = marker.phase_changes != self._phase_changes, marker.phase_changes
        for fault in [fault for fault in self._left if fault.is_due(marker, entered=entered)]:
            self._left.remove(fault)
            self._do(fault)

    def _do(self, fault: Fault) -> None:
        where = f"rank {self._rank}, process {os.getpid()}, {self._marker.phase}, step {self._marker.step}"
        _note(self._notes, f"{fault}\t{time.time():.3f}\t{where}\n")
        _INJECT[fault.kind](fault, self._notes.parent, self._main)


def _note(notes: Path, line: str) -> None:
    descriptor = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(descriptor, line.encode("ascii"))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- what each kind does ---------------------------------------------------------------------------------------------


def _kill(fault: Fault, run_dir: Path, main: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(fault: Fault, run_dir: Path, main: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _delay(fault: Fault, run_dir: Path, main: int) -> None:
    time.sleep(fault.seconds)


def _raise(fault: Fault, run_dir: Path, main: int) -> None:
    if threading.get_ident() == main:
        raise PlannedFault(f"planned: {fault}")
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(PlannedFault))


def _loop(fault: Fault, run_dir: Path, main: int) -> None:
    while True:
        pass


def _fill(fault: Fault, run_dir: Path, main: int) -> None:
    block = bytes(_BLOCK_BYTES)
    with (run_dir / _BALLAST).open("ab", buffering=0) as ballast:
        while len(block):
            try:
                ballast.write(block)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                # To the last byte: what is left must not hold the smallest file.
                block = block[: len(block) // 2]


def _cut(fault: Fault, run_dir: Path, main: int) -> None:
    for link in _links():
        subprocess.run(["ip", "link", "set", link, "down"], check=True)


_INJECT: Mapping[FaultKind, Callable[[Fault, Path, int], None]] = {
    "kill": _kill,
    "stop": _stop,
    "delay": _delay,
    "raise": _raise,
    "loop": _loop,
    "fill": _fill,
    "cut": _cut,
}


def _check_here(fault: Fault, run_dir: Path) -> None:
    if fault.kind == "fill":
        free = shutil.disk_usage(run_dir).free
        if free > _DISK_BYTES:
            raise SettingError(
                f"--fault {str(fault)!r}: the disk of {run_dir} has {free >> 30} GiB free, and others use it; give a "
                "--run-dir on a small one, such as from: mount -t tmpfs -o size=64m none DIR"
            )
    if fault.kind == "cut":
        why = _why_not_cut()
        if why:
            raise SettingError(
                f"--fault {str(fault)!r}: {why}; start the node inside a network namespace, as: ip netns exec NAME ..."
            )


def _why_not_cut() -> str:
    if shutil.which("ip") is None:
        return "there is no command ip here"
    try:
        shared = os.stat("/proc/self/ns/net").st_ino == os.stat("/proc/1/ns/net").st_ino
    except OSError:
        return "it cannot be seen whether others use this network"
    if shared:
        return "others use this network"
    return "" if os.geteuid() == 0 else "only root can do it"


def _links() -> list[str]:
    return [path.name for path in Path("/sys/class/net").iterdir() if path.name != "lo"] or [
        line.split(":")[1].split("@")[0].strip()
        for line in subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout.splitlines()
        if " lo:" not in line
    ]
