"""The ranks of this node: started, watched, shown and ended, one generation after the other.

start(plan)  ──►  poll() again and again: who exited, what the leader wrote, who hangs  ──►  all have exited
stop(mode): SIGTERM or SIGINT, later SIGKILL
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from lockstep.errors import LaunchError
from lockstep.launch.attached_terminal import AttachedTerminal
from lockstep.launch.console import Screen, Tail
from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch.diagnosis.hang_monitor import HangMonitor
from lockstep.launch.diagnosis.host_memory import MemoryTracker
from lockstep.launch.diagnosis.root_cause import RankExit
from lockstep.launch.diagnosis.wait_share import Waiting
from lockstep.launch.rendezvous.membership import NodePlacement, Plan, StopMode
from lockstep.launch.run_directory import Job
from lockstep.launch.workers.fork_server import (
    Event,
    ForkServerClient,
    ForkServerDied,
    ForkUnavailable,
    RankExited,
    RankSpec,
)
from lockstep.launch.workers.rank_environment import rank_environment
from lockstep.launch_contract import EXIT_OK, EXIT_STOPPED, TERMINAL
from lockstep.report import RanksFile, RankStatus, StatusFile, lateness
from lockstep.world import World

_TAIL_BYTES = 4096
_RANKS_EVERY_S = 1.0
#: Of a start, until it is said what it waits for.
_SILENT_START_S = 1
#: Grace for ranks whose peers are gone: enough to leave, since there is nothing that they could save together.
_PEER_LOST_GRACE_S = 3.0


class WorkerGroup:
    """This node's ranks."""

    def __init__(
        self,
        job: Job,
        fork_server: ForkServerClient,
        screen: Screen,
        hang_monitor: HangMonitor,
        terminal: AttachedTerminal | None = None,
    ) -> None:
        self._job, self._fork_server, self._screen, self._hang_monitor = job, fork_server, screen, hang_monitor
        self._terminal = terminal
        self._memory = MemoryTracker(fork_server.pid)
        self._ranks_file = RanksFile(job.run_dir, 0)
        self._next_ranks_s, self._late = 0.0, ""
        self._generation = -1
        self._ranks: range = range(0)
        self._host = ""
        self._log_starts: dict[int, int] = {}  # by rank: length of its log before this generation
        self._leads = False  # the leader is on this node
        self._leader_log: Tail | None = None  # where it writes to its log only
        self._start_s, self._heard = 0.0, False  # when the ranks were started, and whether one of them was heard since
        self._exited: dict[int, RankExit] = {}
        self._stop_mode, self._kill_at_s = StopMode.NONE, float("inf")
        #: How all ranks of the generation ended, once they all have.
        self.endings: tuple[RankExit, ...] = ()
        #: They hang.
        self.hangs = False
        #: No other generation is to be started after this one.
        self.final = False

    @property
    def generation(self) -> int:
        """The generation of the ranks that live here, or lived here last; -1 before the first."""
        return self._generation

    @property
    def attached(self) -> int | None:
        """The rank that has the terminal; None: none has."""
        return None if self._terminal is None else self._terminal.rank

    @property
    def running(self) -> bool:
        """Whether some ranks live."""
        return len(self._exited) < len(self._ranks)

    @property
    def failed(self) -> bool:
        """Whether a rank of this generation has failed."""
        return any(not ending.well for ending in self._exited.values())

    def start(self, plan: Plan, placement: NodePlacement) -> None:
        """Start this node's ranks of a generation. Those of the one before must all have ended."""
        job, generation = self._job, plan.generation
        first = plan.first_rank(placement.node_rank)
        self._ranks = range(first, first + plan.members[placement.node_rank].ranks)
        self._generation, self._host = generation, placement.host
        self._exited, self.endings, self.hangs = {}, (), False
        self._ranks_file, self._late = RanksFile(job.run_dir, placement.node_rank), ""
        self._stop_mode, self._kill_at_s = StopMode.NONE, float("inf")
        for rank in self._ranks:
            job.failure(generation, rank).unlink(missing_ok=True)
            with job.log(rank).open("a") as log:
                if generation or log.tell():
                    log.write(f"--- generation {generation}, {datetime.now():%Y-%m-%d %H:%M:%S} ---\n")
        self._log_starts = {rank: job.log(rank).stat().st_size for rank in self._ranks}
        specs = [RankSpec(rank, self._variables(plan, placement, rank), str(job.log(rank))) for rank in self._ranks]
        self._start_s, self._heard = time.monotonic(), False
        self._hang_monitor.begin(self._ranks)
        self._memory.begin()
        self._fork_server.start(specs, placement.listening)
        # The attached rank's output does not come by its log.
        has_log = first == 0 and self.attached != 0
        self._leader_log = Tail(job.log(0), self._log_starts[0]) if has_log else None
        self._leads = first == 0

    def poll(self, timeout_s: float) -> None:
        """Take in what happened, waiting up to ``timeout_s`` for something to happen.

        Raises:
            LaunchError: if the fork server has died.
        """
        terminal = self._terminal
        for event in self._fork_server.events(timeout_s, terminal.descriptors if terminal else ()):
            self._handle(event)
        self._echo()
        self._say_what_is_waited_for()
        self._memory.poll()
        if (now_s := time.monotonic()) >= self._next_ranks_s:
            self._next_ranks_s = now_s + _RANKS_EVERY_S
            ranks = [_row(rank) for rank in self._hang_monitor.waits.ranks(now_s)]
            self._late = lateness(ranks)
            self._ranks_file.write(ranks)
        if self.running and not self.failed and (hang := self._hang_monitor.poll()) is not None:
            self.hangs, self.final = True, not hang.restart
        if time.monotonic() >= self._kill_at_s:
            self._fork_server.kill()
            self._kill_at_s = float("inf")
        if not self.running and self._ranks and not self.endings:
            self._collect_endings()

    def stop(self, mode: StopMode) -> None:
        """Have the ranks end in this way; does nothing if they were asked to end as urgently already."""
        if mode <= self._stop_mode or not self.running:
            return
        self._stop_mode = mode
        if mode is StopMode.KILL:
            self._fork_server.kill()
            return
        self._fork_server.signal(signal.SIGINT if mode is StopMode.INTERRUPT else signal.SIGTERM)
        grace_s = self._job.request.grace_s
        if mode in (StopMode.INTERRUPT, StopMode.TERMINATE):
            self._kill_at_s = time.monotonic() + grace_s
        elif mode is StopMode.PEER_LOST:
            self._kill_at_s = time.monotonic() + min(grace_s, _PEER_LOST_GRACE_S)

    def forget(self) -> None:
        """Forget the last generation, since another coordinator counts generations from 0."""
        self._generation, self._ranks, self._exited, self.endings = -1, range(0), {}, ()

    def close(self) -> None:
        """Show what the leader wrote last, and close its log."""
        while self._echo():
            pass
        if self._leader_log is not None:
            self._screen.leader(self._leader_log.unfinished())
            self._leader_log.close()
            self._leader_log = None
        self._leads = False

    def _handle(self, event: Event) -> None:
        match event:
            case RankExited(rank, status, at_s):
                self._hang_monitor.rank_exited(rank, status)
                stopped = self._stop_mode is not StopMode.NONE
                self._exited[rank] = RankExit(rank, status, at_s, ended_by_us=stopped, host=self._host)
            case ForkUnavailable(why):
                self._screen.say(f"note: ranks start as separate processes, which is slower: {why}")
            case ForkServerDied():
                raise LaunchError(
                    "the fork server, which starts the ranks, died, and all ranks with it; "
                    "what it wrote, if it wrote anything, is above"
                )

    def _variables(self, plan: Plan, placement: NodePlacement, rank: int) -> dict[str, str]:
        world = World(
            rank=rank,
            size=plan.ranks,
            local_rank=rank - self._ranks.start,
            local_size=len(self._ranks),
            node_rank=placement.node_rank,
            nodes=len(plan.members),
            generation=plan.generation,
            address=placement.address,
            port=plan.port,
            run_id=self._job.run_id,
        )
        variables = rank_environment(self._job, world, plan.restart, placement.interface)
        if self._terminal is not None and rank == self._terminal.rank:
            variables[TERMINAL] = self._terminal.begin(self._job.log(rank))
        return variables

    def _collect_endings(self) -> None:
        self.close()
        generation = self._generation
        if self.failed:
            self._hang_monitor.record_hangs(lambda rank: self._job.failure(generation, rank))
        self.endings = tuple(map(self._with_details, self._exited.values()))

    def _with_details(self, ending: RankExit) -> RankExit:
        log = self._job.log(ending.rank)
        failure = Failure.read(self._job.failure(self._generation, ending.rank))
        killed = ending.status == -signal.SIGKILL or (failure is not None and failure.lost_worker)
        return replace(
            ending,
            failure=failure,
            log_tail="" if ending.status in (EXIT_OK, EXIT_STOPPED) else _end_of(log, self._log_starts[ending.rank]),
            memory=self._memory.reason(ending.rank) if killed and not ending.ended_by_us else "",
        )

    def _echo(self) -> bool:
        """Show what the leader and the attached rank wrote; returns whether there was something to show."""
        wrote, waits = self._echo_attached()
        wrote |= self._echo_leader()
        if self._leads and not waits and (status := StatusFile.read(self._job.status)) is not None:
            self._screen.show(replace(status, late=self._late))
        return wrote

    def _echo_attached(self) -> tuple[bool, bool]:
        """Hand on what the attached rank wrote and what its user types; returns whether it wrote, and whether it waits.

        It says that it waits before it writes a prompt, so in this order neither is missed.
        """
        terminal = self._terminal
        if terminal is None or self._generation < 0:
            return False, False
        data = terminal.read()
        self._hang_monitor.hear()
        waits = self._hang_monitor.waits_for_user(terminal.rank)
        self._screen.attached(data, sys.stdout, prompts=waits)
        terminal.prompts(waits)
        terminal.hand_on()
        return bool(data), waits

    def _echo_leader(self) -> bool:
        """Show what the leader wrote, though not the traceback at its end: the cause may be another rank's."""
        if self._leader_log is None:
            return False
        # In this order: the traceback follows the record, so what is in the log before the record is no traceback.
        up_to = self._leader_log.size()
        failure = Failure.read(self._job.failure(self._generation, 0))
        if failure is not None and failure.kind != "SystemExit":  # which prints none
            up_to = min(up_to, failure.log_bytes)
        text = self._leader_log.read(up_to)
        self._screen.leader(text)
        self._screen.unfinished(self._leader_log.unfinished())
        return bool(text)

    def _say_what_is_waited_for(self) -> None:
        """Until the first rank is heard: that torch is being imported, which may take a minute on a busy machine."""
        if self._heard or not self.running:
            return
        self._heard = self._hang_monitor.heard_any
        for_s = int(time.monotonic() - self._start_s)
        if not self._heard and for_s >= _SILENT_START_S:
            self._screen.unfinished(f"starting: importing torch ({for_s} s)")


def _row(rank: Waiting) -> RankStatus:
    beat = rank.beat
    source = f"{Path(beat.place.file).name}:{beat.place.line}" if beat.place.file else ""
    return RankStatus(beat.rank, beat.step, beat.phase, f"{source} {beat.call}".strip(), rank.waits, rank.silent_s)


def _end_of(log: Path, start: int) -> str:
    """The last lines of ``log``, of what was written since it was ``start`` bytes long."""
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def without_repeated_tracebacks(endings: Sequence[RankExit]) -> Sequence[RankExit]:
    """Endings small enough for a store: of those that failed alike, only the first one keeps its traceback."""
    seen: set[object] = set()
    small: list[RankExit] = []
    for ending in sorted(endings, key=lambda ending: ending.since_s):
        repeated = ending.failure is not None and ending.failure_key in seen
        seen.add(ending.failure_key)
        small.append(_without_traceback(ending) if repeated else ending)
    return small


def _without_traceback(ending: RankExit) -> RankExit:
    return replace(ending, failure=ending.failure and replace(ending.failure, traceback=""))
