"""Why a generation ended as it did: the one cause among all that its ranks reported and did, and the text that says it.

    ranks that failed by themselves ─┬─ report that a peer is gone ─►  collateral
                                     └─ the rest, earliest first ───►  the cause, and others of the same kind
    ranks that left as if all were done, before others then failed ─►  the cause, where all others are collateral
    ranks that the launcher ended ──────────────────────────────────►  not reported

The coordinator makes one `Diagnosis` of all that is known, from which the exit code and the screens of all nodes come.
All of it is a function of values, so that each kind of failure can be tested without causing it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.formatting import format_ranks, grouped
from lockstep.launch.diagnosis.error_record import HANG, Failure, aborted_by_watchdog
from lockstep.launch_contract import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_KILLED,
    EXIT_NOT_SAVED,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_TIMEOUT,
    EXIT_USAGE,
    STOP_SIGNALS,
)

#: Exit codes that a script may choose by itself; the others mean something here, to Grid Engine, or to the shell.
_OF_SCRIPTS = frozenset(range(1, 126)) - {EXIT_USAGE, EXIT_NOT_SAVED, EXIT_STOPPED, EXIT_TIMEOUT, 99, 100}
_NOTICED_S = 1.0
_TRACEBACK_LINES = 40
_MESSAGE_LINES = 12
_TAIL_LINES = 6


@dataclass(frozen=True, slots=True)
class RankExit:
    """How one rank ended."""

    rank: int
    status: int  #: exit code, or minus the signal that killed it
    at_s: float  #: on the host's monotonic clock
    ended_by_us: bool = False  #: the launcher had asked it to, or killed it
    failure: Failure | None = None  #: what it said itself
    log_tail: str = ""  #: the end of its log
    host: str = ""  #: where there are several
    memory: str = ""  #: that host memory ran out, and who held it; "" if it did not
    planned: str = ""  #: the fault on purpose that killed it
    part: str = ""  #: what befell a process of the launcher that this rank needs; "": nothing did

    @property
    def well(self) -> bool:
        """Whether it did not fail: it was done, saved or not, or it stopped with a checkpoint."""
        return self.status in (EXIT_OK, EXIT_NOT_SAVED, EXIT_STOPPED)

    @property
    def collateral(self) -> bool:
        """Whether it ended because another rank was gone."""
        if self.part:
            return False
        if self.failure is not None:
            return self.failure.collateral
        return self.status == -signal.SIGABRT and aborted_by_watchdog(self.log_tail)

    @property
    def hung(self) -> bool:
        """Whether it made no progress and was ended for that."""
        return self.failure is not None and self.failure.kind == HANG

    @property
    def since_s(self) -> float:
        """When it failed; a rank that raised an error may take a while to end."""
        if self.part:
            # It is noticed after its ranks may have noticed.
            return self.at_s - _NOTICED_S
        return self.failure.raised_s if self.failure else self.at_s

    @property
    def failure_key(self) -> object:
        """Equal for ranks that failed in the same way."""
        if self.part:
            return self.part
        if self.failure is None:
            return self.status
        if self.hung:
            return self.failure.message
        return (self.failure.kind, self.failure.message, self.failure.file, self.failure.line)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """How a generation ended, found once: the exit code, and the cause of a failure with what else failed."""

    ranks: int  #: of the generation
    code: int  #: of all launchers, if nothing follows
    cause: RankExit | None = None  #: of the failure, or who could not save; None: all ended well, or were stopped
    alike: tuple[int, ...] = ()  #: ranks that failed in the same way, the cause's own among them
    others: tuple[RankExit, ...] = ()  #: ranks that failed in another way of their own
    collateral: tuple[int, ...] = ()  #: ranks that then lost a peer
    hosts: tuple[str, ...] = ()  #: of the ranks that failed alike, where there are several
    memory: tuple[str, ...] = ()  #: how much GPU memory each rank had used, where that of one ran out


def has_failed(rank_exit: RankExit) -> bool:
    """Whether this exit, by itself, means that the generation has failed.

    A rank that we ended has not, unless it says that something else went wrong on its way out, such as a checkpoint
    that could not be written.
    """
    # A rank may have left with 0 while the others wait for it.
    if rank_exit.part or rank_exit.hung:
        return True
    if rank_exit.well:
        return False
    spoke = rank_exit.failure is not None and not rank_exit.failure.ends_well and not rank_exit.collateral
    return spoke or not rank_exit.ended_by_us


def diagnose(exits: Sequence[RankExit], *, ranks: int | None = None, stopped_by: int | None = None) -> Diagnosis:
    """How the generation ended whose ranks ended as ``exits`` say.

    The cause is the earliest failure that does not blame a peer. If each does: the first rank that had left by itself,
    as if all were done; else the earliest of all.

    Args:
        exits: of all ranks that are known, at least one.
        ranks: of the generation; None: so many as ``exits``.
        stopped_by: the first signal that asked the launcher to stop; None if none did.
    """
    ranks = len(exits) if ranks is None else ranks
    failed = sorted(filter(has_failed, exits), key=lambda rank_exit: (rank_exit.collateral, rank_exit.since_s))
    if not failed:
        code = _code_without_failure(exits, stopped_by)
        return Diagnosis(ranks, code, _unsaved(exits) if code == EXIT_NOT_SAVED else None)
    left = _left_early(exits, failed) if failed[0].collateral else []
    cause = (left or failed)[0]
    own = [rank_exit for rank_exit in (*left, *failed) if not rank_exit.collateral]
    alike = {cause.rank} | {rank_exit.rank for rank_exit in own if rank_exit.failure_key == cause.failure_key}
    return Diagnosis(
        ranks=ranks,
        code=_code_of_failed(cause, failed, stopped_by),
        cause=cause,
        alike=tuple(sorted(alike)),
        others=tuple(rank_exit for rank_exit in own if rank_exit.rank not in alike),
        collateral=tuple(sorted(e.rank for e in failed if e.collateral and e.rank not in alike)),
        hosts=tuple(sorted({e.host for e in (*left, *failed) if (e.rank in alike or cause.collateral) and e.host})),
        memory=_gpus(cause, failed),
    )


def _left_early(exits: Sequence[RankExit], failed: Sequence[RankExit]) -> list[RankExit]:
    """The ranks that left by themselves, as if all were done, before those that then ``failed``, in this order."""
    last_s = min(rank_exit.at_s for rank_exit in failed) + _NOTICED_S
    by_themselves = [e for e in exits if e.well and not e.ended_by_us and not e.collateral]
    left = [e for e in by_themselves if e not in failed and e.at_s <= last_s]
    return sorted(left, key=lambda rank_exit: rank_exit.at_s)


def _code_without_failure(exits: Sequence[RankExit], stopped_by: int | None) -> int:
    """The exit code of the launcher where no rank failed."""
    codes = {rank_exit.status for rank_exit in exits}
    if codes == {EXIT_OK}:
        return EXIT_OK
    if all(rank_exit.well for rank_exit in exits):
        return EXIT_NOT_SAVED if EXIT_NOT_SAVED in codes else EXIT_STOPPED
    return EXIT_FAILED if stopped_by is None else 128 + stopped_by


def _code_of_failed(cause: RankExit, failed: Sequence[RankExit], stopped_by: int | None) -> int:
    """The exit code of the launcher where ``cause`` made ranks fail."""
    # A scheduler that stops us may send its signal to every process of the job.
    own = [rank_exit for rank_exit in failed if not rank_exit.collateral and -rank_exit.status not in STOP_SIGNALS]
    if stopped_by is not None and not own:
        return 128 + stopped_by
    if cause.part:
        return EXIT_FAILED
    if cause.status == -signal.SIGKILL and not cause.hung:
        return EXIT_KILLED
    if all(rank_exit.status == EXIT_INTERRUPTED for rank_exit in failed):
        return EXIT_INTERRUPTED
    if cause.failure is not None and cause.failure.kind == "SystemExit" and cause.status in _OF_SCRIPTS:
        return cause.status
    causes = [rank_exit for rank_exit in failed if not rank_exit.collateral] or failed
    return EXIT_USAGE if all(rank_exit.status == EXIT_USAGE for rank_exit in causes) else EXIT_FAILED


def _unsaved(exits: Sequence[RankExit]) -> RankExit:
    """The rank among ``exits`` that says best what is not saved."""
    left = sorted((e for e in exits if e.status == EXIT_NOT_SAVED), key=lambda rank_exit: rank_exit.rank)
    # The record of that may be what did not fit on the disk, too.
    return next((one for one in left if _unsaved_note(one)), left[0])


def format_diagnosis(
    diagnosis: Diagnosis, *, log: Callable[[int], str], shown: Callable[[Path], str], again: str
) -> str:
    """The report of a run that failed, or that could not save its last step, which is shown last.

    Args:
        diagnosis: with a cause.
        log: names a rank's log.
        shown: a path as the user would write it.
        again: the command that goes on from the last checkpoint.
    """
    cause, ranks = diagnosis.cause, diagnosis.ranks
    assert cause is not None, "there is nothing to report"
    if diagnosis.code == EXIT_NOT_SAVED:
        return _format_not_saved(cause, ranks, log(cause.rank), again)
    if cause.part:
        return _format_lost_part(cause, log(cause.rank))
    if cause.collateral:
        return _format_lost_connections(diagnosis, cause, log(cause.rank), shown)
    what = _what(cause).replace("was killed", "were killed") if len(diagnosis.alike) > 1 else _what(cause)
    headline = cause.failure.headline if cause.failure is not None else ""
    lines = [f"run failed: {headline or f'{_who(diagnosis, cause)} {what}'}"]
    lines += [f"    {line}" for line in _why(cause)]
    if cause.failure is not None and cause.failure.file:
        lines.append(f"    at {shown(Path(cause.failure.file))}:{cause.failure.line}")
        if cause.failure.source:
            lines.append(f"        {cause.failure.source}")
    elif cause.failure is None:
        tail = cause.log_tail.splitlines()[-_TAIL_LINES:]
        lines += ["    the last lines of its log:", *(f"        {line}" for line in tail)] if tail else []
    lines += [f"    {line}" for line in cause.memory.splitlines()]
    lines += [f"    {line}" for line in diagnosis.memory]
    for alike in grouped((other.failure_key, other) for other in diagnosis.others).values():
        lines.append(
            f"  {format_ranks([e.rank for e in alike])} also {_what(alike[0])}{_briefly(alike[0])}{_times(alike)}"
        )
    if diagnosis.collateral:
        whose = "their" if len(diagnosis.collateral) > 1 else "its"
        lines.append(f"  {format_ranks(diagnosis.collateral)} then lost {whose} peer")
    lines.append(f"  full log: {log(cause.rank)}{'; the other ranks beside it' if ranks > 1 else ''}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class FailureLine:
    """Why a generation failed, in one line."""

    text: str
    raised: bool  #: its own code ended it, by an error or an exit, and not something from outside


def failure_line(exits: Sequence[RankExit]) -> FailureLine:
    """The cause among ``exits``, at least one of which has failed."""
    return in_one_line(diagnose(exits))


def in_one_line(diagnosis: Diagnosis) -> FailureLine:
    """The cause of a failure."""
    cause, ranks = diagnosis.cause, diagnosis.ranks
    assert cause is not None, "none has failed"
    failure = cause.failure
    spoke = cause.status > 0 if failure is None else not failure.lost_worker
    raised = spoke and not cause.hung and not cause.collateral
    why = (cause.memory.splitlines() or (_why(cause) if failure is not None else []) or [""])[0]
    place = f" ({Path(failure.file).name}:{failure.line})" if failure is not None and failure.file else ""
    everybody = len(diagnosis.alike) == ranks
    whose = f"all {ranks} ranks" if everybody else f"{format_ranks(diagnosis.alike)} of {ranks}"
    who = f"{whose} " if ranks > 1 else ""
    lost = _lost_connections(diagnosis) if cause.collateral else ""
    what = (failure.headline if failure is not None else "") or cause.part or lost or f"{who}{_what(cause)}"
    return FailureLine(f"{what}{f': {why}' if why else ''}{place}", raised)


def _format_not_saved(cause: RankExit, ranks: int, log: str, again: str) -> str:
    """The report of a run that trained to the end and left with `EXIT_NOT_SAVED`, as rank ``cause`` tells it."""
    lines = [
        "not saved: the run is trained to its end, but its last checkpoint is missing",
        *(f"    {line}" for line in _unsaved_note(cause) or cause.log_tail.splitlines()[-_TAIL_LINES:]),
        f"  to go on: {again}",
        f"  full log: {log}{'; the other ranks beside it' if ranks > 1 else ''}",
    ]
    return "\n".join(lines)


def _unsaved_note(rank_exit: RankExit) -> list[str]:
    """What `Run` has noted on its SystemExit of what is missing."""
    return rank_exit.failure.message.partition("\n")[2].splitlines() if rank_exit.failure else []


def format_traceback(diagnosis: Diagnosis) -> str:
    """The traceback to show before the last block, "" if there is none; the end of a long one."""
    cause = diagnosis.cause
    # What is not the program's fault needs no place in it.
    if (
        cause is None
        or cause.collateral
        or cause.part
        or cause.failure is None
        or cause.failure.ends_well
        or cause.status == EXIT_USAGE
    ):
        return ""
    lines = cause.failure.traceback.rstrip("\n").splitlines()
    if len(lines) > _TRACEBACK_LINES:
        lines = [
            *lines[:3],
            f"  ... {len(lines) - _TRACEBACK_LINES} lines, in the log ...",
            *lines[3 - _TRACEBACK_LINES :],
        ]
    return "\n".join(lines)


def _format_lost_part(cause: RankExit, log: str) -> str:
    lines = [f"run failed: {cause.part}{f' (host {cause.host})' if cause.host else ''}"]
    lines += ["    it is a process of the launcher; no rank is to blame"]
    if "SIGKILL" in cause.part:
        lines += [f"    {line}" for line in _REASONS[signal.SIGKILL]]
    return "\n".join([*lines, f"  full log: {log}"])


def _format_lost_connections(diagnosis: Diagnosis, cause: RankExit, log: str, shown: Callable[[Path], str]) -> str:
    """The report where ranks only say that they have lost others: none of them is accused."""
    lines = [f"run failed: {_lost_connections(diagnosis)}"]
    if (failure := cause.failure) is not None:
        lines.append(f"    rank {cause.rank}: {failure.message.partition(chr(10))[0]}")
        lines += [f"    at {shown(Path(failure.file))}:{failure.line}"] if failure.file else []
    lines += [
        "  no rank reports a cause of its own: it is the network between them, or a host; see also the logs of the "
        "ranks that are not named",
        f"  full log: {log}{'; the other ranks beside it' if diagnosis.ranks > 1 else ''}",
    ]
    return "\n".join(lines)


def _lost_connections(diagnosis: Diagnosis) -> str:
    """Such as ``ranks 0, 1 of 4 (hosts n1, n2) lost their connections to other ranks``."""
    ranks = sorted({*diagnosis.alike, *diagnosis.collateral})
    hosts = f" (host{'s' * (len(diagnosis.hosts) > 1)} {', '.join(diagnosis.hosts)})" if diagnosis.hosts else ""
    lost = "its connection to another rank" if len(ranks) == 1 else "their connections to other ranks"
    return f"{format_ranks(ranks)} of {diagnosis.ranks}{hosts} lost {lost}"


def _who(diagnosis: Diagnosis, cause: RankExit) -> str:
    ranks = diagnosis.ranks
    own = {cause.failure.host} if cause.failure else set()
    hosts = sorted((set(diagnosis.hosts) or own) - {""})
    host = f" (host{'s' * (len(hosts) > 1)} {', '.join(hosts)})" if hosts else ""
    if ranks > 1 and len(diagnosis.alike) == ranks:
        return f"all {ranks} ranks{host}"
    if len(diagnosis.alike) > 1:
        return f"{format_ranks(diagnosis.alike)} of {ranks}{host}"
    return f"rank {cause.rank} of {ranks}{host}"


def _what(rank_exit: RankExit) -> str:
    if rank_exit.hung:
        return "hung"
    if rank_exit.failure is not None and rank_exit.failure.ends_well:
        return f"left with exit code {rank_exit.status}"
    if rank_exit.failure is not None:
        return f"raised {rank_exit.failure.kind}"
    return how_it_ended(rank_exit.status)


def how_it_ended(status: int) -> str:
    """How a process ended, in words, from its exit code or minus the signal that killed it."""
    return f"was killed by {signal_name(-status)}" if status < 0 else f"left with exit code {status}"


def _why(rank_exit: RankExit) -> list[str]:
    if rank_exit.well and not rank_exit.hung and not rank_exit.collateral:
        return ["while other ranks still needed it: all ranks must do the same steps, and leave after the last one"]
    if rank_exit.failure is not None:
        if rank_exit.failure.ends_well and rank_exit.failure.message == str(rank_exit.status):
            return []
        lines = rank_exit.failure.message.splitlines()
        if len(lines) > _MESSAGE_LINES:
            lines = [*lines[:2], "...", *lines[3 - _MESSAGE_LINES :]]
        return lines
    if rank_exit.planned:
        return [f"as planned, by --fault: {rank_exit.planned}"]
    if rank_exit.memory:
        return []
    return _REASONS.get(-rank_exit.status, [])


def _gpus(cause: RankExit, failed: Sequence[RankExit]) -> tuple[str, ...]:
    """Each rank's GPU memory, where that of one ran out."""
    if cause.failure is None or not cause.failure.kind.endswith("OutOfMemoryError"):
        return ()
    by_rank = sorted(failed, key=lambda rank_exit: rank_exit.rank)
    return tuple(f"rank {e.rank}: {e.failure.gpu}" for e in by_rank if e.failure and e.failure.gpu)


def _times(alike: Sequence[RankExit]) -> str:
    return f" (x{len(alike)} ranks)" if len(alike) > 1 else ""


def _briefly(rank_exit: RankExit) -> str:
    if rank_exit.failure is None:
        return ""
    first, _, _ = rank_exit.failure.message.partition("\n")
    return f": {first}" if first else ""


def signal_name(signum: int) -> str:
    """Such as ``SIGTERM``, or ``signal 40`` for one without a name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


_REASONS: dict[int, list[str]] = {
    signal.SIGKILL: [
        "by the system or by hand: most often the kernel when host memory runs out (see dmesg), or a scheduler's limit"
    ],
    signal.SIGTERM: ["somebody asked it to end: a scheduler, an administrator, or the script itself"],
    signal.SIGSEGV: ["a fault in compiled code: an extension, a driver, or a library that does not fit torch"],
    signal.SIGBUS: ["most often shared memory ran out (/dev/shm): use fewer loader workers, or ask for a larger one"],
    signal.SIGILL: ["compiled code for another processor: a library that was built for a newer CPU"],
    signal.SIGFPE: ["a fault in compiled code: an integer division by zero"],
    signal.SIGABRT: ["compiled code gave up; it mostly says why in the log"],
    signal.SIGXCPU: ["its CPU time limit is reached (see: ulimit -t)"],
}
