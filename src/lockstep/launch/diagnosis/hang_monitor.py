"""Monitors the ranks of this machine: receives their heartbeats, and when they hang, reports which ranks and where.

    heartbeats ─► poll()  ─── all is well ─────────────────────────────────────────►  None
                     │
                     └─ a rank is overdue ─► process states ─► stacks, by signal ─►  the report, on the screen
                                                                                       and in RUN_DIR/hangs
                                                                                          │
                                                        --on-hang, and how sure it is ────┴─►  Hang, or None

Called from the launcher's loop; it never waits for a rank longer than `STACKS_S`.
"""

from __future__ import annotations

import linecache
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lockstep.formatting import relative_path
from lockstep.heartbeat import NOTHING, NOWHERE, Stacks, is_registered, read_stacks
from lockstep.launch.diagnosis.error_record import HANG, Failure
from lockstep.launch.diagnosis.hang_analysis import (
    HangDiagnosis,
    HangTimeouts,
    HeartbeatTracker,
    Link,
    RankState,
    diagnose_hang,
    overdue_ranks,
    with_stacks,
)
from lockstep.launch.diagnosis.hang_report import Recovered, Worker, cut_links, report, sentence
from lockstep.launch.diagnosis.rank_places import RankPlaces, merge_places
from lockstep.launch.host import procfs
from lockstep.launch.host.timed_calls import FileThread
from lockstep.launch.run_dir.run_directory import Job
from lockstep.launch.timeouts import ELSEWHERE_S, STACKS_S, STILL_S, WORKERS_S
from lockstep.launch.workers.generation import Generation
from lockstep.launch.workers.rank_messages import RankChannel
from lockstep.launch_contract import STACKS_SIGNAL
from lockstep.memory_use import text_of
from lockstep.small_files import size_of

#: A file that has not grown for this long is whole.
_QUIET_S = 0.06
_LOOK_EVERY_S = 0.2
_LINKS_EVERY_S = 1.0
_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Hang:
    """The generation is to be ended."""

    diagnosis: HangDiagnosis
    restart: bool  #: whether another generation may follow


@dataclass(slots=True, eq=False)
class _HangState:
    """What the monitor remembers of one generation between two looks."""

    cut: tuple[Link, ...] = ()  #: links from this host over which nothing is acknowledged
    links_seen: float = -math.inf  #: when that was looked at
    overdue_since: float | None = None
    diagnosis: HangDiagnosis | None = None  #: the hang that was reported and still lasts
    ends: bool = False  #: for that hang; what ranks do while they are ended says nothing about it
    left_to_others: bool = False  #: to end the generation for that hang


class HangMonitor:
    """Follows the ranks of one launcher on this host, one generation after the other.

    Args:
        channel: brings the messages of the ranks.
        timeouts: how long ranks may take.
        job: says where ranks write their stacks, where reports are kept, and what to do then. Where the user has not
            said it, the generation is ended if it cannot end well by itself, or if the user has said how long to wait;
            otherwise a hang is only reported.
        files: reads and writes there.
        say: shows text to the user.
        now: a clock that does not run while the host sleeps.
    """

    def __init__(
        self,
        channel: RankChannel,
        timeouts: HangTimeouts,
        job: Job,
        *,
        files: FileThread,
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel: Final = channel
        self._timeouts, self._on_hang = timeouts, job.request.on_hang
        self._job, self._files, self._say = job, files, say
        self._now = now
        self._looked_at = 0.0
        #: The generation whose ranks are followed.
        self.current = Generation(HeartbeatTracker((), now()))
        self._seen = _HangState()

    def begin(
        self,
        ranks: range,
        world_size: int | None = None,
        number: int = 0,
        *,
        host: str = "",
        peers: Mapping[str, str] = MappingProxyType({}),
    ) -> Generation:
        """A new generation starts, of ``world_size`` ranks on all nodes; all ranks of the one before are dead.

        ``host`` is this node, and ``peers`` are the hosts of the others by their addresses, where there are several.
        """
        self._channel.begin()
        world_size = len(ranks) if world_size is None else world_size
        self.current = Generation(HeartbeatTracker(ranks, self._now()), number, ranks, world_size, host, peers)
        self._seen = _HangState()
        return self.current

    def hear(self) -> float:
        """Take in heartbeats; returns the time."""
        now = self._now()
        current = self.current
        current.tracker.note_time(now)
        beats, failures = self._channel.receive()
        for failure in failures:
            current.failures.setdefault(failure.rank, failure)
        current.waits.hear(beats, now)
        for beat in beats:
            current.tracker.hear(beat, now)
        return now

    def poll(self) -> Hang | None:
        """Take in heartbeats and report a hang; to be called several times a second.

        Returns the hang if the generation is to be ended because of it.
        """
        now, current, seen = self.hear(), self.current, self._seen
        if seen.ends or now < self._looked_at + _LOOK_EVERY_S:
            return None
        self._looked_at = now
        rank_states = current.tracker.rank_states(now)
        ranks = overdue_ranks(rank_states, self._timeouts, current.tracker.step_times)
        own = self._own_places(rank_states, bool(ranks))
        if not ranks:
            seen.overdue_since = None
            if seen.diagnosis is not None:
                self._say(str(Recovered(seen.diagnosis.culprits, seen.diagnosis.for_s)))
                seen.diagnosis = None
            return None
        seen.overdue_since = now if seen.overdue_since is None else seen.overdue_since
        everywhere = merge_places([own, current.elsewhere])
        waited_s = now - seen.overdue_since
        if len(everywhere.ranks) < current.world_size and waited_s < ELSEWHERE_S:
            return None  # other nodes are about to say where their ranks are
        # The node of a rank that keeps the others waiting ends the generation, for it can say why.
        alone = seen.left_to_others and waited_s >= 2 * ELSEWHERE_S
        places = own if alone else everywhere
        own_hosts = dict.fromkeys(own.ranks, current.host) if current.host else {}
        hosts = {**own_hosts, **places.hosts}
        found = diagnose_hang(places.rank_states, places.process_states, places.exited, places.cut, hosts)
        diagnosis = replace(found, hosts=places.hosts)
        before, seen.diagnosis = seen.diagnosis, diagnosis
        is_news = before is None or (diagnosis.is_certain and not before.is_certain)
        is_news |= self._ends_own_ranks(diagnosis) and not self._ends_own_ranks(before)
        if not is_news:
            return None
        ends = self._on_hang != "wait" and (
            diagnosis.is_certain or self._on_hang is not None or self._timeouts.hang_after_s is not None
        )
        seen.ends = ends and self._ends_own_ranks(diagnosis)
        seen.left_to_others = ends and not seen.ends
        seen.diagnosis = self._tell(diagnosis, ends)
        return Hang(seen.diagnosis, restart=self._on_hang != "abort") if seen.ends else None

    def _ends_own_ranks(self, diagnosis: HangDiagnosis | None) -> bool:
        """Whether it is for this node to end the hang."""
        return diagnosis is not None and any(rank not in diagnosis.hosts for rank in diagnosis.to_end)

    def _own_places(self, rank_states: Sequence[RankState], overdue: bool) -> RankPlaces:
        """Where the ranks of this node are; for the other nodes, too, once they have stood still for a while."""
        current = self.current
        exited = current.tracker.exited
        shared = current.world_size > len(rank_states) + len(exited)
        still_s = max((max(s.silent_s, s.same_phase_s) for s in rank_states), default=0.0)
        current.places = ""
        if not overdue and (not shared or still_s < STILL_S):
            return RankPlaces()
        states = {s.rank: _process_state(s.beat.process) for s in rank_states if s.beat is not None}
        own = RankPlaces(tuple(rank_states), states, exited, cut=self._cut_links())
        current.places = own.to_text() if shared else ""
        return own

    def _cut_links(self) -> tuple[Link, ...]:
        """The other hosts of the job that do not acknowledge what this one sends them."""
        current, seen, now = self.current, self._seen, self._now()
        if current.peers and now >= seen.links_seen + _LINKS_EVERY_S:
            seen.links_seen = now
            hosts = {current.peers[address] for address in procfs.unanswered() & current.peers.keys()}
            seen.cut = tuple(Link(current.host, host) for host in sorted(hosts))
        return seen.cut

    def hang_failures(self) -> dict[int, Failure]:
        """What stands for the failure record of each rank that hangs, by rank; empty if none does.

        For when the generation ends because of the hang: by us, or by the other ranks' own timeouts.
        """
        seen = self._seen
        # Where another node has ended the generation for it, that one says so for all.
        if seen.diagnosis is None or (seen.left_to_others and not seen.ends):
            return {}
        diagnosis, began_s = seen.diagnosis, self._now() - seen.diagnosis.for_s
        said, found = sentence(diagnosis, self._file), {}
        headline = cut_links(diagnosis)
        if not headline and diagnosis.nobody_differs and len(diagnosis.culprits) == self.current.world_size > 1:
            headline = f"all {self.current.world_size} ranks hung"
        beats = {rank_state.rank: rank_state.beat for rank_state in diagnosis.rank_states}
        for rank in diagnosis.culprits:
            if rank in diagnosis.hosts:
                continue
            # Where several hang, the line of one of them is not the cause. One that has left may have said where.
            beat, left = beats.get(rank), self.current.failures.get(rank)
            place = beat.place if beat and len(diagnosis.culprits) == 1 else NOWHERE
            file, line = (left.file, left.line) if left is not None and left.ends_well else (place.file, place.line)
            found[rank] = Failure(
                rank=rank,
                host=socket.gethostname(),
                kind=HANG,
                message=said,
                file=file,
                line=line,
                source=self._source(file, line),
                traceback="",
                collateral=False,
                raised_s=began_s,
                log_bytes=1 << 62,
                headline=headline,
            )
        return found

    def _tell(self, diagnosis: HangDiagnosis, ends: bool) -> HangDiagnosis:
        """Report and store all that can be known; returns the diagnosis with what the stacks have added."""
        local = [s for s in diagnosis.rank_states if s.rank not in diagnosis.hosts]
        processes = {s.rank: s.beat.process for s in local if s.beat is not None}
        home, none = self._job.stacks(0).parent, dict[int, Stacks]()
        stacks = self._files.ask(lambda: self._ask(processes), none, of=home, urgent=True, within_s=2 * STACKS_S)
        diagnosis = with_stacks(diagnosis, stacks)
        children = {
            s.rank: procfs.children(processes[s.rank])[:_WORKERS]
            for s in local
            if s.rank in diagnosis.culprits and s.beat is not None and s.beat.call == "next(loader)"
        }
        end_s = time.monotonic() + WORKERS_S
        workers = {
            rank: [self._ask_worker(rank, child) for child in found if time.monotonic() < end_s]
            for rank, found in children.items()
        }
        text = report(diagnosis, stacks, workers, shown=self._file, source=self._source)
        path = self._files.ask(lambda: self._keep(text, stacks, workers), None, of=self._job.hangs, urgent=True)
        lines = [text, *([f"  all threads of all ranks: {relative_path(path)}"] if path else [])]
        if not ends:
            lines.append("  the run waits; --on-hang abort or --on-hang restart would end it here")
        self._say("\n".join(lines))
        return diagnosis

    def _ask(self, processes: Mapping[int, int]) -> dict[int, Stacks]:
        """The stacks of the ranks with these process ids, as far as they answer."""
        files = {rank: self._job.stacks(rank) for rank in processes}
        before = {rank: text_of(file) for rank, file in files.items()}
        sizes = {file: size_of(file) for file in files.values()}
        asked = [rank for rank, process in processes.items() if _ask_process(process)]
        _settle({files[rank]: sizes[files[rank]] for rank in asked})
        return {rank: read_stacks(before[rank], text_of(files[rank])[len(before[rank]) :]) for rank in asked}

    def _ask_worker(self, rank: int, process: int) -> Worker:
        state = _process_state(process)
        # It writes where its rank does, whose file it has inherited.
        path = self._job.stacks(rank)

        def stacks() -> Stacks:
            before, size = text_of(path), size_of(path)
            if not _ask_process(process):
                return NOTHING
            _settle({path: size})
            return read_stacks(before, text_of(path)[len(before) :])

        return Worker(process, state, self._files.ask(stacks, NOTHING, of=path, within_s=2 * STACKS_S))

    def _keep(self, text: str, stacks: Mapping[int, Stacks], workers: Mapping[int, Sequence[Worker]]) -> Path | None:
        parts = [text, ""]
        for rank, found in sorted(stacks.items()):
            parts += [f"--- rank {rank}", found.text]
        for rank, children in sorted(workers.items()):
            for child in children:
                parts += [f"--- process {child.process} of rank {rank}", child.stacks.text]
        self._job.hangs.mkdir(parents=True, exist_ok=True)
        number = 1 + len(list(self._job.hangs.iterdir()))
        path = self._job.hangs / f"hang-{number}.txt"
        path.write_text("\n".join(parts), encoding="utf-8")
        return path

    def _source(self, file: str, line: int) -> str:
        return self._files.ask(lambda: linecache.getline(file, line).strip()[:80], "", of=Path(file))

    def _file(self, name: str) -> str:
        return relative_path(Path(name))


def _settle(start: Mapping[Path, int]) -> None:
    """Wait until each file has grown beyond its size at the start, and then grows no more; `STACKS_S` at most."""
    end = time.monotonic() + STACKS_S
    sizes, quiet_since = dict(start), time.monotonic()
    while time.monotonic() < end:
        time.sleep(0.01)
        new = {path: size_of(path) for path in start}
        if new != sizes:
            sizes, quiet_since = new, time.monotonic()
        elif time.monotonic() - quiet_since > _QUIET_S and all(sizes[path] > start[path] for path in start):
            return


def _ask_process(process: int) -> bool:
    """Ask a process for its stacks; False if it cannot answer now, or would die of the question."""
    if _process_state(process) in ("stopped", "tracing-stop", "zombie", "dead"):
        return False
    status = procfs.status(process)
    if status and not is_registered(status):
        return False
    try:
        os.kill(process, STACKS_SIGNAL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _process_state(process: int) -> str:
    """What a process does, in psutil's words, such as ``sleeping``; "" if it cannot be seen."""
    # Late: nobody needs it while all is well.
    import psutil

    try:
        return str(psutil.Process(process).status())
    except psutil.Error:
        return ""
