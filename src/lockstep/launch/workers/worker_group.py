"""The ranks of this node: started, watched, shown and ended, one generation after the other.

start(plan)  ──►  poll() again and again: who exited, what the leader wrote, who hangs  ──►  all have exited
stop(mode): SIGTERM or SIGINT, later SIGKILL; without the fork server where that does not answer
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from lockstep.launch.attached_terminal import AttachedTerminal
from lockstep.launch.deadline_thread import FileThread, ScreenThread
from lockstep.launch.diagnosis.hang_monitor import Hang, HangMonitor
from lockstep.launch.diagnosis.host_memory import MemoryTracker
from lockstep.launch.diagnosis.part_monitor import PartMonitor
from lockstep.launch.diagnosis.rank_places import RankPlaces, merge_places
from lockstep.launch.diagnosis.root_cause import RankExit, how_it_ended
from lockstep.launch.diagnosis.wait_share import Waiting
from lockstep.launch.rendezvous.plan import NodePlacement, Plan, StopMode
from lockstep.launch.request import Executable
from lockstep.launch.run_directory import Job
from lockstep.launch.workers.fork_messages import (
    Event,
    ForkServerDied,
    ForkUnavailable,
    LeaseExpired,
    RankExited,
    RankSpec,
    StoreExited,
    StoreUnused,
)
from lockstep.launch.workers.fork_server_client import ForkServerClient
from lockstep.launch.workers.rank_environment import rank_environment
from lockstep.launch.workers.rank_exits import described_endings, fails_late, prepare_files, unused_store
from lockstep.launch.workers.rank_output import RankOutput
from lockstep.launch_contract import TERMINAL
from lockstep.report import RanksFile, RankStatus, lateness
from lockstep.world import World

_RANKS_EVERY_S = 1.0
#: Of a start, until it is said what it waits for.
_SILENT_START_S = 1
#: Grace for ranks whose peers are gone: enough to begin to leave what each of them holds, which has the whole grace.
_PEER_LOST_GRACE_S = 3.0
#: How long the fork server may take to answer, until the launcher signals and kills the ranks itself.
_ANSWER_S = 2.0
#: How long a killed rank may take to end. A large process takes seconds; one blocked in the kernel may never end.
_UNKILLABLE_S = 60.0

_FORK_SERVER = "the fork server, which starts the ranks,"
_STORE = "the store where the ranks meet"


class WorkerGroup:
    """This node's ranks.

    Args:
        job: what is carried out.
        open_fork_server: starts the process whose children the ranks are: now, and again when it has died.
        screen: for the user.
        hang_monitor: hears the ranks.
        files: reads and writes the run directory.
        terminal: of the attached rank; None: there is none.
    """

    def __init__(
        self,
        job: Job,
        open_fork_server: Callable[[], ForkServerClient],
        screen: ScreenThread,
        hang_monitor: HangMonitor,
        files: FileThread,
        terminal: AttachedTerminal | None = None,
    ) -> None:
        self._job, self._screen, self._hang_monitor, self._files = job, screen, hang_monitor, files
        self._open_fork_server = open_fork_server
        self._fork_server: ForkServerClient | None = open_fork_server()
        self._terminal = terminal
        #: Brings to the screen what the ranks write.
        self.output = RankOutput(job, files, screen, hang_monitor, terminal)
        self._parts = PartMonitor(screen.say)
        self._lost_part, self._lost_part_s = "", 0.0  # which of these is gone, and since when
        self._memory = MemoryTracker(self._fork_server.pid)
        self._ranks_file = RanksFile(job.run_dir, 0)
        self._next_ranks_s = 0.0
        # Nodes that hear nothing of this one go on without it after so long, and then its ranks must be gone.
        self._lease_s = 0.0 if job.request.nodes is None else job.request.nodes.lost_after_s
        self._generation = -1
        self._ranks: range = range(0)
        self._host = ""
        self._log_starts: Mapping[int, int] = {}  # by rank: length of its log before this generation
        self._start_s, self._heard = 0.0, False  # when the ranks were started, and whether one of them was heard since
        self._exited: dict[int, RankExit] = {}
        self._stop_mode = StopMode.NONE
        self._kill_at_s, self._killed_s, self._leave_by_s = float("inf"), float("inf"), float("inf")
        self._asked_with: signal.Signals | None = None  # and not known to have been heard
        self._world_size, self._store_unused = 0, False
        # Ranks that were killed before the others, such as those that hung, and when.
        self._culprits, self._culprits_s = frozenset[int](), 0.0
        #: How all ranks of the generation ended, once they all have.
        self.endings: tuple[RankExit, ...] = ()
        #: They hang.
        self.hangs = False
        #: No other generation is to be started after this one.
        self.final = False

    @property
    def generation(self) -> int:
        """The generation of the ranks that run here, or ran here last; -1 before the first."""
        return self._generation

    @property
    def attached(self) -> int | None:
        """The rank that has the terminal; None: none has."""
        return self.output.attached

    @property
    def running(self) -> bool:
        """Whether some ranks live."""
        return len(self._exited) < len(self._ranks)

    @property
    def failed(self) -> bool:
        """Whether a rank of this generation has failed, or something that all of them need."""
        return (
            self._lost_part != ""
            or any(not ending.well for ending in self._exited.values())
            or fails_late(self._hang_monitor.failures.values(), self._exited)
        )

    @property
    def causes(self) -> tuple[bool, bool]:
        """Whether a rank says that its connection to another one broke; whether one failed for another reason."""
        told = {rank: f for rank, f in self._hang_monitor.failures.items() if not f.ends_well}
        silent = [e for e in self._exited.values() if not e.well and not e.ended_by_us and e.rank not in told]
        other = [failure for failure in told.values() if not failure.collateral]
        return len(other) < len(told), bool(other or silent or self._lost_part)

    @property
    def places(self) -> str:
        """Where the ranks are, for the other nodes, once they make no progress; "" before."""
        return self._hang_monitor.places if self.running else ""

    def note_places(self, told: Mapping[str, str]) -> None:
        """Take in where the ranks of other nodes are, by host, as their `places` say."""
        self._hang_monitor.elsewhere = merge_places(RankPlaces.from_text(text, host) for host, text in told.items())

    @property
    def step(self) -> int:
        """The newest step that a rank of this generation has done, as far as heartbeats say; -1: they do not."""
        return self._hang_monitor.step

    def start(self, plan: Plan, placement: NodePlacement) -> None:
        """Start this node's ranks of a generation. Those of the one before must all have ended."""
        job, generation = self._job, plan.generation
        first = plan.first_rank(placement.node_rank)
        self._ranks = range(first, first + plan.members[placement.node_rank].ranks)
        self._generation, self._host = generation, placement.host
        self._exited, self.endings, self.hangs = {}, (), False
        self._ranks_file = RanksFile(job.run_dir, placement.node_rank)
        self._stop_mode, self._kill_at_s, self._killed_s = StopMode.NONE, float("inf"), float("inf")
        self._asked_with, self._lost_part, self._culprits = None, "", frozenset()
        self._world_size, self._store_unused = plan.ranks, False
        files = [(job.log(rank), job.failure(generation, rank)) for rank in self._ranks]
        unknown = [0] * len(self._ranks)
        before = self._files.ask(lambda: prepare_files(files, generation), unknown, of=job.logs, urgent=True)
        self._log_starts = dict(zip(self._ranks, before, strict=True))
        if self._fork_server is None:
            self._fork_server = self._open_fork_server()
            self._memory = MemoryTracker(self._fork_server.pid)
        specs = [RankSpec(rank, self._variables(plan, placement, rank), str(job.log(rank))) for rank in self._ranks]
        # A program that is no Python says nothing.
        self._start_s, self._heard = time.monotonic(), isinstance(job.request.program, Executable)
        self._hang_monitor.begin(self._ranks, plan.ranks)
        self._memory.begin()
        self._fork_server.start(specs, placement.listening)
        self.output.begin(generation, leads=first == 0, log_start=self._log_starts.get(0, 0))

    def poll(self, timeout_s: float) -> None:
        """Take in what happened, waiting up to ``timeout_s`` for something to happen."""
        if self._fork_server is None:
            time.sleep(timeout_s)
        else:
            for event in self._fork_server.events(timeout_s, self.output.descriptors):
                self._handle(event)
        self._hang_monitor.hear()
        self._look_at_parts()
        self.output.show()
        self._say_what_is_waited_for()
        self._memory.poll()
        if (now_s := time.monotonic()) >= self._next_ranks_s:
            if self._lease_s and self.running and self._fork_server is not None:
                self._fork_server.renew_lease(self._lease_s)
            self._write_ranks(now_s)
        suspects = self._parts.suspects
        if self.running and not self.failed and not suspects and (hang := self._hang_monitor.poll()) is not None:
            self.final = not hang.restart
            self._end_hang(hang)
        self._insist(time.monotonic())
        if not self.running and self._ranks and not self.endings:
            self._collect_endings()

    def stop(self, mode: StopMode, reason: str = "", lost: Collection[str] = ()) -> None:
        """Have the ranks end in this way, and tell the user why; nothing if they were asked as urgently already.

        Their connections to the addresses ``lost`` end at once.
        """
        if lost and self.running:
            self._hang_monitor.leave_lost(lost)
        if mode <= self._stop_mode or not self.running:
            return
        self._stop_mode = mode
        if mode is StopMode.KILL:
            self._kill()
            return
        if reason:
            self._hang_monitor.leave_reason(reason)
        self._asked_with = signal.SIGINT if mode is StopMode.INTERRUPT else signal.SIGTERM
        if self._fork_server is not None:
            self._fork_server.signal(self._asked_with)
        grace_s = self._job.request.grace_s
        if mode in (StopMode.INTERRUPT, StopMode.TERMINATE):
            self._kill_at_s = time.monotonic() + grace_s
        elif mode is StopMode.PEER_LOST:
            self._kill_at_s = time.monotonic() + min(grace_s, _PEER_LOST_GRACE_S)
            self._leave_by_s = time.monotonic() + grace_s

    def forget(self) -> None:
        """Forget the last generation, since another coordinator counts generations from 0."""
        self._generation, self._ranks, self._exited, self.endings = -1, range(0), {}, ()

    def close(self) -> None:
        """Kill the ranks that still live, end the fork server, and show what the leader wrote last."""
        self.output.close()
        if self._fork_server is not None and not self._fork_server.close():
            held = ", ".join(str(process) for process in self._fork_server.processes().values())
            self._screen.say(
                f"note: the kernel holds processes that were killed, until what they wait for is back: {held}"
            )
        self._fork_server = None

    def _kill(self) -> None:
        self._kill_at_s = float("inf")
        if self._killed_s == float("inf"):
            self._killed_s = time.monotonic()
        if self._fork_server is not None:
            self._fork_server.kill()

    def _end_hang(self, hang: Hang) -> None:
        """Kill the ranks that hang: those that wait for them then see them gone, and leave the state that they hold."""
        culprits = frozenset(hang.diagnosis.culprits)
        if self._fork_server is None or not culprits < set(self._ranks):
            self.hangs = True
            return
        self._culprits, self._culprits_s = culprits, time.monotonic()
        self._fork_server.kill_ranks(culprits)

    def _insist(self, now_s: float) -> None:
        """Do what was asked for and did not happen."""
        leaves = self._stop_mode is StopMode.PEER_LOST
        still_leaves = leaves and self._hang_monitor.saves and now_s < self._leave_by_s
        if now_s >= self._kill_at_s and not still_leaves:
            self._kill()
        fork_server = self._fork_server
        if fork_server is None or not self.running:
            return
        if self._culprits - self._exited.keys() and now_s >= self._culprits_s + _ANSWER_S:
            self.hangs = True  # the kernel does not let them end, so the others wait for ever
        if fork_server.silent_s >= _ANSWER_S:
            if now_s >= self._killed_s + _ANSWER_S:
                fork_server.kill_directly()
            elif self._asked_with is not None:
                fork_server.signal_directly(self._asked_with)
                self._asked_with = None
        if now_s >= self._killed_s + _UNKILLABLE_S:
            for rank in set(self._ranks) - self._exited.keys():
                process = fork_server.processes().get(rank, 0)
                self._screen.say(
                    f"note: rank {rank} (process {process}) was killed, but the kernel has not ended it yet"
                )
                self._exited[rank] = RankExit(rank, -signal.SIGKILL, now_s, ended_by_us=True, host=self._host)

    def _look_at_parts(self) -> None:
        """See whether the fork server or the store is stopped, and does not go on."""
        if self._fork_server is None:
            return
        parts = {self._fork_server.pid: _FORK_SERVER}
        if self.running and self._fork_server.store is not None:
            parts[self._fork_server.store] = _STORE
        self._parts.watch(parts)
        if (part := self._parts.poll()) is None:
            return
        if part.process == self._fork_server.pid:
            self._lose_part(f"{_FORK_SERVER} was stopped and did not go on", time.monotonic())
            self._fork_server.kill_directly()
        else:
            self._lose_part(f"{_STORE} was stopped and did not go on", time.monotonic(), ranks_live=True)
            os.kill(part.process, signal.SIGKILL)

    def _lose_part(self, what: str, at_s: float, *, ranks_live: bool = False) -> None:
        """What all ranks need is gone; with ``ranks_live`` they do not end by themselves."""
        if not self.running or self._lost_part or self._stop_mode is not StopMode.NONE:
            return
        self._lost_part, self._lost_part_s = what, at_s
        if ranks_live and self._job.request.max_restarts and self._world_size > 1 and self._fork_server is not None:
            # All of them hold the last step: where one is gone, the others leave what they hold.
            self._culprits, self._culprits_s = frozenset({self._ranks[-1]}), time.monotonic()
            self._fork_server.kill_ranks(self._culprits)

    def _handle(self, event: Event) -> None:
        match event:
            case RankExited(rank, status, at_s):
                self._hang_monitor.rank_exited(rank, status)
                stopped = self._stop_mode is not StopMode.NONE or rank in self._culprits
                self._exited[rank] = RankExit(rank, status, at_s, ended_by_us=stopped, host=self._host)
            case ForkUnavailable(why):
                self._screen.say(f"note: ranks start as separate processes, which is slower: {why}")
            case StoreExited(status, at_s):
                self._lose_part(f"{_STORE} {how_it_ended(status)}", at_s, ranks_live=True)
            case StoreUnused():
                self._store_unused = True
            case ForkServerDied(status, why):
                self._lose_fork_server(status, why)
            case LeaseExpired():
                self._stop_mode = StopMode.KILL
                self._screen.say("this launcher was stopped for so long that its ranks were ended")

    def _lose_fork_server(self, status: int | None, why: str) -> None:
        """The fork server is dead, and all ranks with it."""
        assert self._fork_server is not None, "it has told so itself"
        now_s, how = time.monotonic(), "closed its connection" if status is None else how_it_ended(status)
        self._lose_part(f"{_FORK_SERVER} {how}{f': {why}' if why else ''}", now_s)
        stopped = self._stop_mode is not StopMode.NONE
        for rank in set(self._ranks) - self._exited.keys():
            self._hang_monitor.rank_exited(rank, -signal.SIGKILL)
            self._exited[rank] = RankExit(
                rank, -signal.SIGKILL, now_s, ended_by_us=stopped, host=self._host, part=self._lost_part
            )
        self._fork_server.close()
        self._fork_server = None

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

    def _write_ranks(self, now_s: float) -> None:
        """Where ranks are, or were last, and what memory they take, for other terminals and for later."""
        self._next_ranks_s = now_s + _RANKS_EVERY_S
        ranks = [_row(rank) for rank in self._hang_monitor.waits.ranks(now_s)]
        self.output.late = lateness(ranks)
        ranks_file = self._ranks_file
        self._files.ask(lambda: ranks_file.write(ranks), None, of=ranks_file.path)

    def _collect_endings(self) -> None:
        self._write_ranks(self._hang_monitor.hear())
        self.output.close()
        exited = sorted(self._exited.values(), key=lambda ending: ending.rank)
        if self._lost_part and not all(ending.well for ending in exited):
            lost = replace(exited[0], part=self._lost_part, at_s=self._lost_part_s, ended_by_us=False)
            exited[0] = exited[0] if exited[0].part else lost
        hung = self._hang_monitor.hang_failures() if self.failed else {}
        told = hung | self._hang_monitor.failures
        self.endings = described_endings(
            exited, self._job, self._generation, self._log_starts, self._files, told, self._memory.reason
        )
        if self._store_unused and (note := unused_store(self.endings, self._world_size, self._job)):
            self._screen.say(note)

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
    place = f"{source} {beat.call}".strip()
    return RankStatus(beat.rank, beat.step, beat.phase, place, rank.waits, rank.silent_s, beat.memory)
