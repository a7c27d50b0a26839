"""The ranks of this node: begun, listened to, shown and ended, one generation after the other.

begin(plan)  ──►  look() again and again: who fell, what the leader wrote, who hangs  ──►  all have fallen
end(how): TERM or INT, later KILL
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from lockstep.errors import LaunchError
from lockstep.launch.console import Screen, Tail
from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch.diagnosis.hang_monitor import HangMonitor
from lockstep.launch.diagnosis.host_memory import MemoryTracker
from lockstep.launch.diagnosis.root_cause import RankExit
from lockstep.launch.diagnosis.wait_share import Waiting
from lockstep.launch.rendezvous.membership import How, Plan
from lockstep.launch.run_directory import Job
from lockstep.launch.workers.fork_server import Birth, Fell, Lost, Nursery, Plain
from lockstep.launch.workers.rank_environment import of_rank
from lockstep.launch_contract import EXIT_OK, EXIT_STOPPED
from lockstep.report import RanksFile, RankStatus, StatusFile, lateness
from lockstep.world import World

_TAIL_BYTES = 4096
_RANKS_EVERY_S = 1.0
#: Grace for ranks whose peers are gone: enough to leave, and there is nothing that they could save together.
_BROKEN_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class Spot:
    """Where this node stands in a generation, and how its ranks reach the others."""

    node_rank: int
    address: str  #: where the ranks meet
    meeting: socket.socket | None  #: that very place, on the node that has it
    host: str = ""  #: this node's name, where there are several
    interface: str = ""  #: of this host, which leads to the others; "": the ranks find it out


class Crew:
    """This node's ranks."""

    def __init__(self, job: Job, nursery: Nursery, screen: Screen, hang_monitor: HangMonitor) -> None:
        self._job, self._nursery, self._screen, self._hang_monitor = job, nursery, screen, hang_monitor
        self._memory = MemoryTracker(nursery.pid)
        self._ranks_file = RanksFile(job.run_dir, 0)
        self._next_ranks_s, self._late = 0.0, ""
        self._generation = -1
        self._ranks: range = range(0)
        self._host = ""
        self._starts_at: dict[int, int] = {}
        self._tail: Tail | None = None  # of the leader, where it is ours
        self._fell: dict[int, RankExit] = {}
        self._how, self._kill_at_s = How.NOT, float("inf")
        #: How they ended, once all have.
        self.endings: tuple[RankExit, ...] = ()
        #: They do not get on.
        self.hangs = False
        #: What they do is not to be tried again.
        self.final = False

    @property
    def generation(self) -> int:
        """Of the ranks that are here, or were here last; -1 before the first."""
        return self._generation

    @property
    def running(self) -> bool:
        """Whether ranks live."""
        return len(self._fell) < len(self._ranks)

    @property
    def trouble(self) -> bool:
        """Whether a rank fell badly."""
        return any(not ending.well for ending in self._fell.values())

    def begin(self, plan: Plan, spot: Spot) -> None:
        """Start this node's ranks of a generation. Those of the one before have all ended."""
        job, generation = self._job, plan.generation
        first = plan.first_rank(spot.node_rank)
        self._ranks = range(first, first + plan.members[spot.node_rank].ranks)
        self._generation, self._host = generation, spot.host
        self._fell, self.endings, self.hangs = {}, (), False
        self._ranks_file, self._late = RanksFile(job.run_dir, spot.node_rank), ""
        self._how, self._kill_at_s = How.NOT, float("inf")
        for rank in self._ranks:
            job.failure(generation, rank).unlink(missing_ok=True)
            with job.log(rank).open("a") as log:
                if generation or log.tell():
                    log.write(f"--- generation {generation}, {datetime.now():%Y-%m-%d %H:%M:%S} ---\n")
        self._starts_at = {rank: job.log(rank).stat().st_size for rank in self._ranks}
        births = [Birth(rank, self._variables(plan, spot, rank), str(job.log(rank))) for rank in self._ranks]
        self._hang_monitor.begin(self._ranks)
        self._memory.begin()
        self._nursery.start(births, spot.meeting)
        self._tail = Tail(job.log(0), self._starts_at[0]) if first == 0 else None

    def look(self, timeout_s: float) -> None:
        """See what happened, waiting up to ``timeout_s`` for it.

        Raises:
            LaunchError: if what starts the ranks is gone.
        """
        for event in self._nursery.events(timeout_s):
            match event:
                case Fell(rank, status, at_s):
                    self._hang_monitor.rank_exited(rank, status)
                    self._fell[rank] = RankExit(rank, status, at_s, self._how is not How.NOT, host=self._host)
                case Plain(why):
                    self._screen.say(f"note: ranks start as separate processes, which is slower: {why}")
                case Lost():
                    raise LaunchError(
                        "the process that starts the ranks is gone, and all ranks with it; "
                        "its own words, if it had any, are above"
                    )
        self._echo()
        self._memory.poll()
        if (now_s := time.monotonic()) >= self._next_ranks_s:
            self._next_ranks_s = now_s + _RANKS_EVERY_S
            ranks = [_row(one) for one in self._hang_monitor.waits.ranks(now_s)]
            self._late = lateness(ranks)
            self._ranks_file.write(ranks)
        if self.running and not self.trouble and (hang := self._hang_monitor.poll()) is not None:
            self.hangs, self.final = True, not hang.restart
        if time.monotonic() >= self._kill_at_s:
            self._nursery.kill()
            self._kill_at_s = float("inf")
        if not self.running and self._ranks and not self.endings:
            self._close_books()

    def end(self, how: How) -> None:
        """Have the ranks end in this way; nothing new if they are asked already."""
        if how <= self._how or not self.running:
            return
        self._how = how
        if how is How.KILL:
            self._nursery.kill()
            return
        self._nursery.signal(signal.SIGINT if how is How.NOW else signal.SIGTERM)
        grace_s = self._job.request.grace_s
        if how in (How.NOW, How.HARD):
            self._kill_at_s = time.monotonic() + grace_s
        elif how is How.BROKEN:
            self._kill_at_s = time.monotonic() + min(grace_s, _BROKEN_GRACE_S)

    def forget(self) -> None:
        """Generations are counted anew: what was here last was none of them."""
        self._generation, self._ranks, self._fell, self.endings = -1, range(0), {}, ()

    def close(self) -> None:
        """Show what the leader wrote last."""
        if self._tail is not None:
            while self._echo():
                pass
            self._screen.leader(self._tail.begun())
            self._tail.close()
            self._tail = None

    def _variables(self, plan: Plan, spot: Spot, rank: int) -> dict[str, str]:
        world = World(
            rank=rank,
            size=plan.ranks,
            local_rank=rank - self._ranks.start,
            local_size=len(self._ranks),
            node_rank=spot.node_rank,
            nodes=len(plan.members),
            generation=plan.generation,
            address=spot.address,
            port=plan.port,
            run_id=self._job.run_id,
        )
        return of_rank(self._job, world, plan.restart, spot.interface)

    def _close_books(self) -> None:
        self.close()
        generation = self._generation
        if self.trouble:
            self._hang_monitor.record_hangs(lambda rank: self._job.failure(generation, rank))
        self.endings = tuple(map(self._with_words, self._fell.values()))

    def _with_words(self, ending: RankExit) -> RankExit:
        log = self._job.log(ending.rank)
        failure = Failure.read(self._job.failure(self._generation, ending.rank))
        killed = ending.status == -signal.SIGKILL or (failure is not None and failure.lost_worker)
        return replace(
            ending,
            failure=failure,
            log_tail="" if ending.status in (EXIT_OK, EXIT_STOPPED) else _end_of(log, self._starts_at[ending.rank]),
            memory=self._memory.reason(ending.rank) if killed and not ending.ended_by_us else "",
        )

    def _echo(self) -> bool:
        """Show what the leader wrote, though not the traceback it ends with: the cause may be another rank's.

        Returns whether there was something.
        """
        if self._tail is None:
            return False
        # In this order: what was in the log before there was a record is not the traceback, which follows the record.
        up_to = self._tail.size()
        failure = Failure.read(self._job.failure(self._generation, 0))
        if failure is not None and failure.kind != "SystemExit":  # which prints none
            up_to = min(up_to, failure.log_bytes)
        text = self._tail.read(up_to)
        self._screen.leader(text)
        self._screen.begun(self._tail.begun())
        if (status := StatusFile.read(self._job.status)) is not None:
            self._screen.show(replace(status, late=self._late))
        return bool(text)


def _row(one: Waiting) -> RankStatus:
    beat = one.beat
    place = f"{Path(beat.place.file).name}:{beat.place.line}" if beat.place.file else ""
    return RankStatus(beat.rank, beat.step, beat.phase, f"{place} {beat.call}".strip(), one.waits, one.silent_s)


def _end_of(log: Path, start: int) -> str:
    """The last lines of ``log``, of what was written since it was ``start`` bytes long."""
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def told_by(endings: Sequence[RankExit]) -> Sequence[RankExit]:
    """Endings small enough for a table: one whole traceback of each kind, that of the first to end."""
    seen: set[object] = set()
    small: list[RankExit] = []
    for ending in sorted(endings, key=lambda ending: ending.since_s):
        told_already = ending.failure is not None and ending.failure_key in seen
        seen.add(ending.failure_key)
        small.append(_without_traceback(ending) if told_already else ending)
    return small


def _without_traceback(ending: RankExit) -> RankExit:
    return replace(ending, failure=ending.failure and replace(ending.failure, traceback=""))
