"""The store of a job on several machines, as an agent uses it: it reads and writes through a thread.

    node n1, whose host is the endpoint                          node n2
    agent ── thread ──►  store, a process of its own  ◄── thread ── agent
    coordinator          contract    what must be equal          reads plan and notices,
                         nodes       ids in order of joining     and that the coordinator lives
                         node/*      each node's report, with
                                     a heartbeat
                         endings/*   how its ranks ended
                         notice/*    numbered, the coordinator's
                         plan        the coordinator's

It is torch's TCPStore. A call to it may last as long as the network pleases, so a thread makes all calls, and the agent
only reads what the thread brought last. When the store does not answer, the thread is given up and another one asks.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Final

from lockstep.errors import LaunchError
from lockstep.launch.diagnosis.root_cause import RankExit
from lockstep.launch.rendezvous.endpoint import Endpoint
from lockstep.launch.rendezvous.job_contract import JobContract
from lockstep.launch.rendezvous.membership import NodeReport, NodeView, Plan
from lockstep.launch.rendezvous.notices import (
    Notice,
    endings_from_json,
    endings_to_json,
    notice_from_json,
    notice_to_json,
)
from lockstep.launch.rendezvous.store import RendezvousStore

#: The environment variable from which torch reads how much its C++ code writes.
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_EVERY_S = 0.2  #: how often the thread writes and reads, at least
_CONNECT_S = 2.0
_ANSWER_S = 5.0
_CREATE_S = 60.0  #: how long the store's own process may take to answer first
_WAIT_NOTICE_S = (3.0, 60.0)


class TcpStoreClient(RendezvousStore):
    """One agent's access to the store; `create_store` makes the coordinator's.

    Args:
        endpoint: where the store listens.
        contract: what the store holds already.
        report: this node's first report.
        lost_after_s: a store that does not answer for so long is asked by another thread.
    """

    def __init__(self, endpoint: Endpoint, contract: JobContract, report: NodeReport, *, lost_after_s: float) -> None:
        self._is_coordinator = report.node_id == contract.coordinator
        self._contract = contract
        self._endpoint, self._lost_after_s = endpoint, lost_after_s
        self._lock: Final = threading.Lock()
        self._wake: Final = threading.Event()
        self._report: NodeReport = report
        self._endings: dict[int, str] = {}  # by generation: of our ranks, to be written
        self._plan = Plan(generation=contract.generation)
        self._notices: tuple[Notice, ...] = ()
        self._notices_written = 0
        self._nodes: dict[str, _NodeRecord] = {}
        self._beat = 0
        self._coordinator_beat = -1
        self._heard_s = self._busy_since_s = time.monotonic()
        self._thread_number = 0
        self._start_thread()

    @property
    def is_coordinator(self) -> bool:
        """Whether this agent decides for all."""
        return self._is_coordinator

    @property
    def coordinator(self) -> str:
        """The id of the node that decides for all."""
        return self._contract.coordinator

    def report(self, report: NodeReport, endings: Sequence[RankExit]) -> None:
        """Have the thread write the report and the endings soon."""
        with self._lock:
            if report != self._report:
                self._wake.set()
            self._report = report
            if endings and report.generation not in self._endings:
                self._endings[report.generation] = endings_to_json(endings)
                self._wake.set()

    def nodes(self) -> Sequence[NodeView]:
        """All nodes, as the thread has read them last."""
        with self._lock:
            return [record.view() for record in self._nodes.values()]

    def publish(self, plan: Plan, notices: Sequence[Notice]) -> None:
        """Have the thread write the notices that are new, and then the plan."""
        with self._lock:
            if plan != self._plan:
                self._wake.set()
            self._plan, self._notices = plan, tuple(notices)

    def plan(self) -> Plan:
        """The plan, as the thread has read it last."""
        with self._lock:
            return self._plan

    def notices(self) -> Sequence[Notice]:
        """All notices, as the thread has read them last."""
        with self._lock:
            return self._notices

    def silent_s(self) -> float:
        """For how long the coordinator has not been heard. Replaces the thread when the store does not answer it."""
        now_s = time.monotonic()
        with self._lock:
            stuck = now_s - self._busy_since_s > self._lost_after_s
            silent_s = now_s - self._heard_s
        if stuck:
            self._start_thread()
        return silent_s

    def close(self) -> None:
        """Write what was reported last, if that is possible within a second, and end the thread."""
        with self._lock:
            beat = self._beat
            self._wake.set()
        end_s = time.monotonic() + 1.0
        while time.monotonic() < end_s and self._beat < beat + 2 and self.silent_s() < self._lost_after_s:
            time.sleep(0.02)
        with self._lock:
            self._thread_number = -1
            self._wake.set()

    def _start_thread(self) -> None:
        with self._lock:
            self._thread_number += 1
            self._busy_since_s = time.monotonic()
            number = self._thread_number
        threading.Thread(target=self._exchange, args=(number,), name="lockstep store client", daemon=True).start()

    def _exchange(self, number: int) -> None:
        """The thread: write and read until another thread, with a higher number, has taken over."""
        store: Any = None
        while True:
            with self._lock:
                if number != self._thread_number:
                    return
                self._busy_since_s = time.monotonic()
            try:
                if store is None:
                    store = open_store(self._endpoint)
                    self._join(store)
                self._write(store, number)
                self._read(store, number)
            except (RuntimeError, OSError, ValueError):
                # What counts is how long it lasts, and the agent looks at that.
                store = None
            self._wake.wait(_EVERY_S)
            self._wake.clear()

    def _join(self, store: Any) -> None:
        node_id, contract = self._report.node_id, JobContract.from_json(store.get("contract"))
        if contract.coordinator != self.coordinator:
            # The coordinator's agent died and another one took over. The plans of the old one mean nothing any more.
            ours, theirs = self._contract, contract
            if self.is_coordinator or (theirs.must_match, theirs.run_dir) != (ours.must_match, ours.run_dir):
                raise OSError("another job uses the store now")
            with self._lock:
                self._contract, self._coordinator_beat = contract, -1
                self._plan, self._notices = Plan(generation=contract.generation), ()
                self._endings.clear()
        if node_id not in store.get("nodes").decode().split():
            with self._lock:
                record = self._next_record()
            store.set(f"node/{node_id}", record)
            store.append("nodes", f"{node_id} ")

    def _next_record(self) -> str:
        """This node's next record; the caller holds the lock."""
        self._beat += 1
        return _record(self._report, self._beat, sorted(self._endings))

    def _write(self, store: Any, number: int) -> None:
        with self._lock:
            endings = self._endings.get(self._report.generation)
            generation, node_id = self._report.generation, self._report.node_id
            plan, notices, record = self._plan, self._notices, self._next_record()
        # In this order: a node that reads a record or a plan finds the endings and the notices that it speaks of.
        if endings is not None:
            store.set(f"endings/{generation}/{node_id}", endings)
        if self.is_coordinator and number == self._thread_number:
            for index in range(self._notices_written, len(notices)):
                store.set(f"notice/{index}", notice_to_json(notices[index]))
            self._notices_written = len(notices)
            store.set("plan", plan.to_json())
        store.set(f"node/{node_id}", record)

    def _read(self, store: Any, number: int) -> None:
        if self.is_coordinator:
            self._read_nodes(store, number)
        else:
            self._read_plan(store, number)

    def _read_plan(self, store: Any, number: int) -> None:
        text, coordinator = store.multi_get(["plan", f"node/{self.coordinator}"])
        plan, beat = Plan.from_json(text.decode()), json.loads(coordinator)["beat"]
        new = [f"notice/{index}" for index in range(len(self._notices), plan.notices)]
        notices = (*self._notices, *(notice_from_json(text.decode()) for text in (store.multi_get(new) if new else ())))
        with self._lock:
            if number == self._thread_number:
                self._plan, self._notices = plan, notices
                if beat != self._coordinator_beat:
                    self._coordinator_beat, self._heard_s = beat, time.monotonic()

    def _read_nodes(self, store: Any, number: int) -> None:
        ids = store.get("nodes").decode().split()
        texts = store.multi_get([f"node/{node_id}" for node_id in ids])
        now_s = time.monotonic()
        records = {
            node_id: self._nodes.get(node_id, _UNKNOWN).update(json.loads(text), now_s)
            for node_id, text in zip(ids, texts, strict=True)
        }
        for node_id, record in records.items():
            generation = record.report.generation
            if generation in record.written and record.endings_of != generation:
                text = store.get(f"endings/{generation}/{node_id}").decode()
                records[node_id] = replace(record, endings_of=generation, endings=endings_from_json(text))
        with self._lock:
            if number == self._thread_number:
                self._nodes, self._heard_s = records, now_s


def _record(report: NodeReport, beat: int, written: Sequence[int]) -> str:
    return json.dumps({"report": asdict(report), "beat": beat, "now_s": time.monotonic(), "written": list(written)})


@dataclass(frozen=True, slots=True)
class _NodeRecord:
    """What the coordinator's thread knows of one node."""

    report: NodeReport
    beat: int = -1
    since_s: float = 0.0  #: when the beat was new, on our clock
    read_s: float = 0.0  #: when it was read last
    ahead_s: float = float("inf")  #: of our clock before its; too large by how long the quickest record was on its way
    written: tuple[int, ...] = ()  #: generations of which it has written the endings
    endings_of: int = -1  #: the generation of ``endings``
    endings: tuple[RankExit, ...] = ()

    def update(self, record: Mapping[str, Any], now_s: float) -> _NodeRecord:
        new = record["beat"] != self.beat
        return replace(
            self,
            report=NodeReport(**record["report"]),
            beat=record["beat"],
            since_s=now_s if new else self.since_s,
            read_s=now_s,
            ahead_s=min(self.ahead_s, now_s - record["now_s"]) if new else self.ahead_s,
            written=tuple(record["written"]),
        )

    def view(self) -> NodeView:
        # Silence counts up to the last read, not up to now: an agent that has slept knows nothing of the others.
        silent_s = self.read_s - self.since_s
        endings = self.endings if self.endings_of == self.report.generation else ()
        return NodeView(self.report, silent_s, tuple(_on_our_clock(ending, self.ahead_s) for ending in endings))


_UNKNOWN: Final = _NodeRecord(NodeReport("", "", 0))


def _on_our_clock(ending: RankExit, ahead_s: float) -> RankExit:
    failure = ending.failure and replace(ending.failure, raised_s=ending.failure.raised_s + ahead_s)
    return replace(ending, at_s=ending.at_s + ahead_s, failure=failure)


def open_store(endpoint: Endpoint) -> Any:
    """A connection to the store at ``endpoint``.

    Raises:
        OSError: if the endpoint cannot be reached.
        RuntimeError: if what listens there is no such store.
    """
    # First with a plain socket: torch would try for long, and write about each try.
    socket.create_connection((endpoint.host, endpoint.port), _CONNECT_S).close()
    TCPStore = _tcp_store_class()  # noqa: N806 - a class
    return TCPStore(
        endpoint.host,
        endpoint.port,
        world_size=None,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=_ANSWER_S),
    )


def _tcp_store_class() -> Any:
    """Torch's TCPStore, imported so that it writes errors only: it would warn of names that it need not resolve."""
    before = os.environ.get(LOG_LEVEL)
    os.environ.setdefault(LOG_LEVEL, "ERROR")
    try:
        # Imported late, so that the launcher of one machine does not load torch.
        from torch._C._distributed_c10d import TCPStore  # as torch.distributed hands it on, with types

        return TCPStore
    finally:
        if before is None:
            del os.environ[LOG_LEVEL]


def create_store(
    endpoint: Endpoint, contract: JobContract, report: NodeReport, *, lost_after_s: float
) -> TcpStoreClient:
    """Fill a new store with its first values, as its coordinator.

    Raises:
        LaunchError: if the store does not answer within a minute.
    """
    end_s = time.monotonic() + _CREATE_S
    while True:
        try:
            store = open_store(endpoint)
            break
        except (RuntimeError, OSError) as error:
            if time.monotonic() > end_s:
                raise LaunchError(f"the store of the job's nodes does not answer at {endpoint}: {error}") from error
        time.sleep(0.1)
    # The coordinator is the first node, since its ranks come first.
    store.set(f"node/{report.node_id}", _record(report, 0, ()))
    store.set("nodes", f"{report.node_id} ")
    store.set("plan", Plan(generation=contract.generation).to_json())
    store.set("contract", contract.to_json())
    return TcpStoreClient(endpoint, contract, report, lost_after_s=lost_after_s)


def read_contract(
    endpoint: Endpoint, *, within_s: float, say: Callable[[str], None], stopped: Callable[[], bool]
) -> JobContract | None:
    """The contract in the store at ``endpoint``, once there is one; None if ``stopped`` first.

    Raises:
        LaunchError: if there is none within ``within_s``, or something else listens there.
    """
    start_s = time.monotonic()
    next_notice_s, host = _WAIT_NOTICE_S[0], socket.gethostname()
    why = ""
    while not stopped():
        waited_s = time.monotonic() - start_s
        if waited_s >= within_s:
            raise LaunchError(
                f"node {host} found no store of this job at {endpoint} within {waited_s:.0f} s ({why}); start "
                f"lockstep run on {endpoint.host} too, and see that no firewall closes port {endpoint.port}"
            )
        if waited_s >= next_notice_s:
            say(f"waiting for {endpoint}, where the nodes meet: {why} ({waited_s:.0f} s)")
            next_notice_s = min(2 * next_notice_s, next_notice_s + _WAIT_NOTICE_S[1])
        try:
            return JobContract.from_json(open_store(endpoint).get("contract"))
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
        except (RuntimeError, ValueError) as error:
            why = f"something else may use the port: {str(error).splitlines()[0]}"
        time.sleep(0.1)
    return None
