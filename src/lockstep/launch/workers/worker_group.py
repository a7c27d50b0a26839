"""The ranks of this node: started, watched, shown and ended, one generation after the other.

start(plan)  ──►  poll() again and again: who exited, what the leader wrote, who hangs  ──►  all have exited
stop(mode): SIGTERM or SIGINT, later SIGKILL; without the fork server where that does not answer
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.launch.diagnosis.hang_analysis import HangTimeouts, Waiting
from lockstep.launch.diagnosis.hang_monitor import Hang, HangMonitor
from lockstep.launch.diagnosis.host_memory import MemoryTracker
from lockstep.launch.diagnosis.part_monitor import PartMonitor
from lockstep.launch.diagnosis.root_cause import how_it_ended
from lockstep.launch.host.machine import Devices, gpu_names, without_accused
from lockstep.launch.host.timed_calls import FileThread, ScreenThread
from lockstep.launch.job.request import Executable
from lockstep.launch.rendezvous.plan import NodePlacement, Plan, StopMode
from lockstep.launch.run_dir.run_directory import Job
from lockstep.launch.terminal.attached_terminal import AttachedTerminal
from lockstep.launch.timeouts import ANSWER_S, PEER_LOST_GRACE_S, TO_LEAVE_S, UNKILLABLE_S, NodeTimeouts
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
from lockstep.launch.workers.generation import Generation
from lockstep.launch.workers.rank_environment import rank_environment, world_of_rank
from lockstep.launch.workers.rank_exits import described_endings, prepare_files, unused_store
from lockstep.launch.workers.rank_messages import RankChannel
from lockstep.launch.workers.rank_output import RankOutput
from lockstep.launch_contract import GENERATION_FILES, LEFT_STATE, TERMINAL
from lockstep.report import RanksFile, RankStatus, lateness

_RANKS_EVERY_S = 1.0
#: Of a start, until it is said what it waits for.
_SILENT_START_S = 1

_FORK_SERVER = "the fork server, which starts the ranks,"
_STORE = "the store where the ranks meet"


@dataclass(slots=True, eq=False)
class _Course:
    """What this launcher has done with the ranks of one generation, and is about to do."""

    log_starts: Mapping[int, int] = field(default_factory=dict)  #: by rank: length of its log before this generation
    ranks_file: RanksFile | None = None
    heard: bool = False  #: whether a rank was heard
    start_s: float = 0.0  #: when the ranks were started
    stop_mode: StopMode = StopMode.NONE
    asked_with: signal.Signals | None = None  #: asked to stop with it, and not known to have received it
    kill_at_s: float = math.inf
    killed_s: float = math.inf
    leave_by_s: float = math.inf
    lost_part_s: float = 0.0  #: when a process that all ranks need was lost
    culprits: frozenset[int] = frozenset()  #: ranks that were killed before the others, such as those that hung
    culprits_s: float = 0.0
    store_unused: bool = False

    def kill_first(self, ranks: Collection[int], fork_server: ForkServerClient) -> None:
        """Kill ``ranks`` before the others."""
        self.culprits, self.culprits_s = frozenset(ranks), time.monotonic()
        fork_server.kill_ranks(self.culprits)


class WorkerGroup:
    """This node's ranks.

    Args:
        job: what is carried out.
        open_fork_server: starts the process whose children the ranks are: now, and again when it has died.
        screen: for the user.
        channel: carries notes to the ranks.
        files: reads and writes the run directory.
        terminal: of the attached rank; None: there is none.
        memory: where ranks leave what they hold when another one dies; None: nowhere.
    """

    def __init__(
        self,
        job: Job,
        open_fork_server: Callable[[], ForkServerClient],
        screen: ScreenThread,
        channel: RankChannel,
        files: FileThread,
        terminal: AttachedTerminal | None = None,
        memory: Path | None = None,
    ) -> None:
        self._left_in = memory
        self._job, self._screen, self._files = job, screen, files
        self._channel = channel
        timeouts = HangTimeouts(job.request.hang_after_s)
        self._hang_monitor = HangMonitor(channel, timeouts, job, files=files, say=screen.say)
        self._open_fork_server = open_fork_server
        self._fork_server: ForkServerClient | None = open_fork_server()
        self._terminal = terminal
        #: Brings to the screen what the ranks write.
        self.output = RankOutput(job, files, screen, self._hang_monitor, terminal)
        self._parts = PartMonitor(screen.say)
        self._memory = MemoryTracker(self._fork_server.pid)
        self._next_ranks_s = 0.0
        # Nodes that hear nothing of this one go on without it, and then its ranks must be gone.
        self._limits = None if job.request.nodes is None else NodeTimeouts(job.request.nodes.lost_after_s)
        self._next_renewal_s = 0.0
        self._course = _Course()
        #: What the next generation's ranks run on.
        self.devices = Devices(job.ranks)
        #: No other generation is to be started after this one.
        self.final = False

    @property
    def current(self) -> Generation:
        """The ranks that run here, or ran here last."""
        return self._hang_monitor.current

    def start(self, plan: Plan, placement: NodePlacement) -> None:
        """Start this node's ranks of a generation. Those of the one before must all have ended."""
        job, generation = self._job, plan.generation
        first = plan.first_rank(placement.node_rank)
        ranks = range(first, first + plan.members[placement.node_rank].ranks)
        files = [(job.log(rank), job.failure(generation, rank)) for rank in ranks]
        unknown = [0] * len(ranks)
        before = self._files.ask(lambda: prepare_files(files, generation), unknown, of=job.logs, urgent=True)
        others = [member for number, member in enumerate(plan.members) if number != placement.node_rank]
        peers = {address: member.host for member in others for address in (member.address, *member.addresses)}
        self._hang_monitor.begin(ranks, plan.ranks, generation, host=placement.host, peers=peers)
        self._course = _Course(
            log_starts=dict(zip(ranks, before, strict=True)),
            ranks_file=RanksFile(job.run_dir, placement.node_rank),
            # A program that is no Python says nothing.
            heard=isinstance(job.request.program, Executable),
        )
        if self._fork_server is None:
            self._fork_server = self._open_fork_server()
            self._memory = MemoryTracker(self._fork_server.pid)
        specs = []
        for rank in ranks:
            world = world_of_rank(plan, placement, rank, job.run_id)
            variables = rank_environment(job, world, plan.restart, placement.interface, plan.save_only)
            variables |= self.devices.variables()
            if self._terminal is not None and rank == self._terminal.rank:
                variables[TERMINAL] = self._terminal.begin(job.log(rank))
            specs.append(RankSpec(rank, variables, str(job.log(rank))))
        self._course.start_s = time.monotonic()
        self._memory.begin()
        self._fork_server.start(specs, placement.listening)
        self.output.begin(generation, self._course.log_starts)

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
        now_s, limits, current = time.monotonic(), self._limits, self.current
        if limits is not None and current.running and self._fork_server is not None and now_s >= self._next_renewal_s:
            self._next_renewal_s = now_s + limits.every_s
            self._fork_server.renew_lease(limits.lost_after_s)
        if now_s >= self._next_ranks_s:
            self._write_ranks(now_s)
        suspects = self._parts.suspects
        if current.running and not current.failed(now_s) and not suspects and (hang := self._hang_monitor.poll()):
            self.final = not hang.restart
            self._end_hang(hang)
        self._insist(time.monotonic())
        if not current.running and current.ranks and not current.endings:
            self._collect_endings()

    def stop(self, mode: StopMode, reason: str = "", lost: Collection[str] = ()) -> None:
        """Have the ranks end in this way, and tell the user why; nothing if they were asked as urgently already.

        Their connections to the addresses ``lost`` end at once.
        """
        course, running = self._course, self.current.running
        if lost and running:
            self._channel.leave_lost(lost)
        if mode <= course.stop_mode or not running:
            return
        course.stop_mode = mode
        if mode is StopMode.KILL:
            self._kill()
            return
        if reason:
            self._channel.leave_reason(reason)
        course.asked_with = signal.SIGINT if mode is StopMode.INTERRUPT else signal.SIGTERM
        if self._fork_server is not None:
            self._fork_server.signal(course.asked_with)
        grace_s = self._job.request.grace_s
        if mode in (StopMode.INTERRUPT, StopMode.TERMINATE):
            course.kill_at_s = time.monotonic() + grace_s
        elif mode is StopMode.PEER_LOST:
            course.kill_at_s = time.monotonic() + min(grace_s, PEER_LOST_GRACE_S)
            course.leave_by_s = time.monotonic() + grace_s

    def forget(self) -> None:
        """Forget the last generation, since another coordinator counts generations from 0."""
        self._course = _Course()
        self._hang_monitor.begin(range(0), number=-1)

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
        self._course.kill_at_s = math.inf
        if self._course.killed_s == math.inf:
            self._course.killed_s = time.monotonic()
        if self._fork_server is not None:
            self._fork_server.kill()

    def _end_hang(self, hang: Hang) -> None:
        """Kill the ranks that hang: those that wait for them then see them gone, and leave the state that they hold."""
        current, diagnosis = self.current, hang.diagnosis
        first = current.living.intersection(diagnosis.to_end)
        # Where all are alike, and nobody will go on from what the others leave, they may as well end together.
        in_vain = diagnosis.nobody_differs and self._left_in is None
        if self._fork_server is None or in_vain or not first or len(first) == current.world_size:
            current.hangs = True
            return
        current.severed = bool(diagnosis.cut)
        self._course.kill_first(first, self._fork_server)

    def _insist(self, now_s: float) -> None:
        """Do what was asked for and did not happen."""
        current, course = self.current, self._course
        leaves = course.stop_mode is StopMode.PEER_LOST
        still_leaves = leaves and current.tracker.saves and now_s < course.leave_by_s
        fork_server = self._fork_server
        has_failed = leaves or course.stop_mode is StopMode.TERMINATE
        if has_failed and not course.culprits and now_s >= course.kill_at_s - TO_LEAVE_S and fork_server is not None:
            silent = current.living & current.tracker.silent(now_s)
            if silent and silent != current.living:
                # The others may wait for them, and leave what they hold once they see them gone.
                course.kill_first(silent, fork_server)
                course.kill_at_s = now_s + PEER_LOST_GRACE_S
        if now_s >= course.kill_at_s and not still_leaves:
            self._kill()
        if fork_server is None or not current.running:
            return
        if course.culprits & current.living and now_s >= course.culprits_s + ANSWER_S:
            current.hangs = True  # the kernel does not let them end, so the others wait for ever
        if fork_server.silent_s >= ANSWER_S:
            if now_s >= course.killed_s + ANSWER_S:
                fork_server.kill_directly()
            elif course.asked_with is not None:
                fork_server.signal_directly(course.asked_with)
                course.asked_with = None
        if now_s >= course.killed_s + UNKILLABLE_S:
            for rank in current.living:
                process = fork_server.processes().get(rank, 0)
                self._screen.say(
                    f"note: rank {rank} (process {process}) was killed, but the kernel has not ended it yet"
                )
                current.note_exit(rank, -signal.SIGKILL, now_s, ended_by_us=True)

    def _look_at_parts(self) -> None:
        """See whether the fork server or the store is stopped, and does not go on."""
        if self._fork_server is None:
            return
        parts = {self._fork_server.pid: _FORK_SERVER}
        if self.current.running and self._fork_server.store is not None:
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
        current, course = self.current, self._course
        if not current.running or current.lost_part or course.stop_mode is not StopMode.NONE:
            return
        current.lost_part, course.lost_part_s = what, at_s
        if ranks_live and self._left_in is not None and current.world_size > 1 and self._fork_server is not None:
            # All of them hold the last step: where one is gone, the others leave what they hold.
            course.kill_first({current.ranks[-1]}, self._fork_server)

    def _handle(self, event: Event) -> None:
        match event:
            case RankExited(rank, status, at_s):
                mode = self._course.stop_mode
                # Who is asked to save and leave is sent no other signal than SIGTERM.
                killed = status < 0 and status != -signal.SIGTERM
                by_us = mode > StopMode.GRACEFUL or (mode is StopMode.GRACEFUL and not killed)
                culprit = rank in self._course.culprits
                self.current.note_exit(rank, status, at_s, ended_by_us=by_us or culprit)
            case ForkUnavailable(why):
                self._screen.say(f"note: ranks start as separate processes, which is slower: {why}")
            case StoreExited(status, at_s):
                self._lose_part(f"{_STORE} {how_it_ended(status)}", at_s, ranks_live=True)
            case StoreUnused():
                self._course.store_unused = True
            case ForkServerDied(status, why):
                self._lose_fork_server(status, why)
            case LeaseExpired():
                self._course.stop_mode = StopMode.KILL
                self._screen.say("this launcher was stopped for so long that its ranks were ended")

    def _lose_fork_server(self, status: int | None, why: str) -> None:
        """The fork server is dead, and all ranks with it."""
        assert self._fork_server is not None, "it has told so itself"
        now_s, how = time.monotonic(), "closed its connection" if status is None else how_it_ended(status)
        self._lose_part(f"{_FORK_SERVER} {how}{f': {why}' if why else ''}", now_s)
        stopped = self._course.stop_mode is not StopMode.NONE
        for rank in self.current.living:
            self.current.note_exit(rank, -signal.SIGKILL, now_s, ended_by_us=stopped, part=self.current.lost_part)
        self._fork_server.close()
        self._fork_server = None

    def _write_ranks(self, now_s: float) -> None:
        """Where ranks are, or were last, and what memory they take, for other terminals and for later."""
        self._next_ranks_s = now_s + _RANKS_EVERY_S
        ranks = [_row(rank) for rank in self.current.waits.ranks(now_s)]
        self.output.late = lateness(ranks)
        if (ranks_file := self._course.ranks_file) is not None:
            self._files.ask(lambda: ranks_file.write(ranks), None, of=ranks_file.path)

    def _collect_endings(self) -> None:
        current, course = self.current, self._course
        now_s = self._hang_monitor.hear()
        self._write_ranks(now_s)
        self.output.close()
        exited = sorted(current.exited.values(), key=lambda ending: ending.rank)
        if current.lost_part and not all(ending.well for ending in exited):
            lost = replace(exited[0], part=current.lost_part, at_s=course.lost_part_s, ended_by_us=False)
            exited[0] = exited[0] if exited[0].part else lost
        failed = current.failed(now_s)
        hung = self._hang_monitor.hang_failures() if failed else {}
        current.endings = described_endings(
            exited, current, self._job, course.log_starts, self._files, hung, self._memory.reason
        )
        self.devices, said = without_accused(
            self.devices, current.endings, current.ranks, lambda: gpu_names(os.environ)
        )
        if said:
            self._screen.say(said)
            self.final = self.final or self.devices.can_start == 0
        if (memory := self._left_in) is not None and failed:
            left_state = f"{GENERATION_FILES.format(run='*', generation=f'{current.number}-*')}/{LEFT_STATE}"
            current.left = self._files.ask(lambda: any(memory.glob(left_state)), False, of=memory)
        if course.store_unused and (note := unused_store(current.endings, current.world_size, self._job)):
            self._screen.say(note)

    def _say_what_is_waited_for(self) -> None:
        """Until the first rank is heard: that torch is being imported, which may take a minute on a busy machine."""
        if self._course.heard or not self.current.running:
            return
        self._course.heard = self.current.tracker.heard_any
        for_s = int(time.monotonic() - self._course.start_s)
        if not self._course.heard and for_s >= _SILENT_START_S:
            self._screen.unfinished(f"starting: importing torch ({for_s} s)")


def _row(rank: Waiting) -> RankStatus:
    beat = rank.beat
    source = beat.place.short
    place = f"{source} {beat.call}".strip()
    return RankStatus(beat.rank, beat.step, beat.phase, place, rank.waits, rank.silent_s, beat.memory)
