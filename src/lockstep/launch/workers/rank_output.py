"""Brings the output of this node's ranks to the screen: the leader's log, its progress, the attached rank."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final, TypedDict

from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch.diagnosis.hang_monitor import HangMonitor
from lockstep.launch.host.timed_calls import FileThread, ScreenThread
from lockstep.launch.run_dir.run_directory import Job
from lockstep.launch.terminal.attached_terminal import AttachedTerminal
from lockstep.launch.terminal.console import Tail
from lockstep.launch.workers.output_comparison import OutputComparison
from lockstep.launch_contract import OWN_MICRO_BATCHES
from lockstep.report import StatusFile


class _Patience(TypedDict, total=False):
    """How long a file may take, see `FileThread.ask`."""

    urgent: bool
    within_s: float


_LAST: Final[_Patience] = {"urgent": True, "within_s": 5.0}  # well before this node counts as lost


class RankOutput:
    """Shows the output of the ranks of one node, one generation after the other.

    Args:
        job: what is carried out.
        files: reads the logs.
        screen: for the user.
        hang_monitor: knows whether the attached rank waits for its user, and what a failing rank said.
        terminal: of the attached rank; None: there is none.
    """

    def __init__(
        self,
        job: Job,
        files: FileThread,
        screen: ScreenThread,
        hang_monitor: HangMonitor,
        terminal: AttachedTerminal | None,
    ) -> None:
        self._job, self._files, self._screen, self._hang_monitor = job, files, screen, hang_monitor
        self._terminal = terminal
        self._leads = False  # the leader is on this node
        self._leader_log: Tail | None = None  # where it writes to its log only
        self._log_start: int | None = None  # of the leader's log, until that is open
        self._comparison: OutputComparison | None = None  # of another rank here; None: not compared, or said already
        self._compares = True
        self._generation = -1
        #: Who keeps the other ranks waiting, in words.
        self.late = ""

    @property
    def attached(self) -> int | None:
        """The rank that has the terminal; None: none has."""
        return None if self._terminal is None else self._terminal.rank

    @property
    def descriptors(self) -> list[int]:
        """What to wait for: keys, and what the attached rank writes."""
        return [] if self._terminal is None else self._terminal.descriptors

    def begin(self, generation: int, log_starts: Mapping[int, int]) -> None:
        """A generation begins; ``log_starts`` are the lengths, in bytes, of the logs of its ranks here before."""
        # The attached rank's output does not come by its log.
        starts = {rank: start for rank, start in log_starts.items() if rank != self.attached}
        self._generation, self._leads, self.late = generation, 0 in log_starts, ""
        self._leader_log, self._log_start = None, starts.get(0)
        self._open_leader_log(urgent=True)
        if self._compares and 0 in starts and len(starts) > 1:
            rank = sorted(starts)[1]
            log = self._files.ask(lambda: Tail(self._job.log(rank), starts[rank]), None, of=self._job.log(rank))
            self._comparison = OutputComparison(rank, log) if log is not None else None

    def show(self, *, last: bool = False) -> bool:
        """Show what the leader and the attached rank wrote; returns whether there was something to show.

        The ``last`` time, files of a busy machine may take five seconds, for what they hold is not asked for again.
        """
        wrote, waits = self._show_attached()
        patience = _LAST if last else {}
        wrote |= self._show_leader(patience)
        if self._leads and not waits:
            status = self._files.ask(lambda: StatusFile.read(self._job.status), None, of=self._job.status, **patience)
            if status is not None:
                self._screen.show(replace(status, late=self.late))
        return wrote

    def close(self) -> None:
        """Show what was written last, and close the leader's log."""
        while self.show(last=True):
            pass
        while self._compare(""):
            pass
        log = self._leader_log
        if log is not None and self._screen.is_behind:
            # The launcher does not wait for a slow reader: the thread of the screen reads the log as it gets on.
            end = self._files.ask(lambda: self._end_of_leader(log), 0, of=self._job.log(0), **_LAST)
            self._screen.rest(_rest_of(log, end))
            self._leader_log = None
        elif log is not None:
            self._screen.leader(log.unfinished())
        self.leave_log()

    def leave_log(self) -> None:
        """Show no more of the leader's log, nor of its progress, in this generation."""
        if self._leader_log is not None:
            self._leader_log.close()
            self._leader_log = None
        self._leads, self._log_start = False, None
        self._leave_comparison()

    def _show_attached(self) -> tuple[bool, bool]:
        """Hand on what the attached rank wrote and what its user types; returns whether it wrote, and whether it waits.

        It says that it waits before it writes a prompt, so in this order neither is missed.
        """
        terminal = self._terminal
        if terminal is None or self._generation < 0:
            return False, False
        data = terminal.read()
        self._hang_monitor.hear()
        waits = self._hang_monitor.current.tracker.waits_for_user(terminal.rank)
        self._screen.attached(data, sys.stdout, prompts=waits)
        terminal.prompts(waits)
        terminal.hand_on()
        return bool(data), waits

    def _show_leader(self, patience: _Patience) -> bool:
        """Show what the leader wrote, though not the traceback at its end: the cause may be another rank's."""
        self._open_leader_log(**patience)
        log = self._leader_log
        if log is None or self._screen.is_behind:
            return False
        new = self._files.ask(lambda: self._new_of_leader(log), b"", of=self._job.log(0), **patience)
        text = log.take(new)
        self._screen.leader(text)
        if text:
            self._compare(text)
        self._screen.unfinished(log.unfinished())
        return bool(new)

    def _compare(self, text: str) -> bool:
        """Compare the leader's new ``text`` with what another rank wrote; returns whether that wrote something."""
        comparison = self._comparison
        if comparison is None:
            return False
        new = self._files.ask(lambda: comparison.log.new(comparison.log.size()), b"", of=self._job.log(comparison.rank))
        pair = comparison.differing(text, comparison.log.take(new))
        is_said = OWN_MICRO_BATCHES in text  # by a rank, which knows the variable
        if pair is not None and not is_said:
            self._screen.say(
                f"rank 0 printed {pair[0]!r}, and rank {comparison.rank} {pair[1]!r}: {OWN_MICRO_BATCHES}, and another "
                "number of ranks may print something else. Bring the parts of all ranks together by run.sum(...) "
                "after the loop, or give run.measure(...) the values in the loop; the word `local` in a line says that "
                "its numbers are one rank's own"
            )
        if pair is not None or is_said:
            self._compares = False
            self._leave_comparison()
        return bool(new)

    def _leave_comparison(self) -> None:
        if self._comparison is not None:
            self._comparison.log.close()
            self._comparison = None

    def _open_leader_log(self, *, urgent: bool = False, within_s: float | None = None) -> None:
        """Open the leader's log, unless it is open; it may not be there yet, as on a disk that is full."""
        if (start := self._log_start) is not None:
            log = self._job.log(0)
            self._leader_log = self._files.ask(lambda: Tail(log, start), None, of=log, urgent=urgent, within_s=within_s)
            self._log_start = None if self._leader_log is not None else start

    def _new_of_leader(self, log: Tail) -> bytes:
        return log.new(self._end_of_leader(log))

    def _end_of_leader(self, log: Tail) -> int:
        # In this order: the traceback follows the record, so what is in the log before the record is no traceback.
        up_to = log.size()
        failure = self._hang_monitor.current.failures.get(0) or Failure.read(self._job.failure(self._generation, 0))
        if failure is not None and failure.kind != "SystemExit":  # which prints none
            up_to = min(up_to, failure.log_bytes)
        return up_to


def _rest_of(log: Tail, end: int) -> Iterator[str]:
    """What was written to ``log`` before its byte ``end``, in parts; closes it. It may be gone meanwhile."""
    with contextlib.closing(log), contextlib.suppress(OSError):
        while new := log.new(end):
            yield log.take(new)
        yield log.unfinished()
