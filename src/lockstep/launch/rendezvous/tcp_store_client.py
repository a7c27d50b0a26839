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

Every value is signed (see `signature`); one that is not, or cannot be read, is treated as if it were not there. A
node's heartbeat is that of its agent's loop and not that of the thread: one that decides nothing any more is lost.

It is torch's TCPStore. A call to it may last as long as the network pleases, so a thread makes all calls, and the agent
only reads what the thread brought last. When the store does not answer, the thread is given up and another one asks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from lockstep.errors import LaunchError
from lockstep.launch.diagnosis.root_cause import RankExit
from lockstep.launch.rendezvous.endpoint import Endpoint
from lockstep.launch.rendezvous.job_contract import JobContract, Signature, is_newest_coordinator
from lockstep.launch.rendezvous.notices import (
    Notice,
    endings_from_json,
    endings_to_json,
    notice_from_json,
    notice_to_json,
)
from lockstep.launch.rendezvous.plan import UNKNOWN, NodeRecord, NodeReport, NodeView, Plan, beat_in, record_text
from lockstep.launch.rendezvous.store import RendezvousStore
from lockstep.launch.rendezvous.store_connection import (
    ConnectedStore,
    ReachedHost,
    ask_store,
    open_store,
    refusals,
)
from lockstep.launch.timeouts import Silence
from lockstep.records import object_from

_EVERY_S = 0.2  #: how often the thread writes and reads, at least
_CREATE_S = 60.0  #: how long the store's own process may take to answer first
#: Nodes that are looked at: anybody may add names to the list of them, though not a record that counts.
_MOST_NODES = 10_000


class TcpStoreClient(RendezvousStore):
    """One agent's access to the store; `create_store` makes the coordinator's.

    Args:
        endpoint: where the store listens.
        contract: what the store holds already.
        report: this node's first report.
        signature: of this run.
        suspect_after_s: a store that does not answer for so long is asked by another thread.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        contract: JobContract,
        report: NodeReport,
        signature: Signature,
        *,
        suspect_after_s: float,
    ) -> None:
        self._signature = signature
        self._is_coordinator = report.node_id == contract.coordinator
        self._contract = contract
        self._endpoint, self._suspect_after_s = endpoint, suspect_after_s
        self.reached: Final = ReachedHost()
        self._lock: Final = threading.Lock()
        self._wake: Final = threading.Event()
        self._report: NodeReport = report
        self._endings: dict[int, str] = {}  # by generation: of our ranks, to be written
        self._plan = Plan(generation=contract.generation)
        self._notices: tuple[Notice, ...] = ()
        self._notices_written = 0
        self._refused: tuple[str, ...] = ()
        self._nodes: dict[str, NodeRecord] = {}
        self._beat = self._writes = 0
        self._heard = Silence(-1, time.monotonic())  # the coordinator, by its beats
        self._busy_since_s = self._heard.since_s
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

    @property
    def term(self) -> int:
        """Of the lease of the node that decides for all; 0 if nobody takes over from it."""
        return self._contract.term

    def report(self, report: NodeReport, endings: Sequence[RankExit]) -> None:
        """Have the thread write the report and the endings soon."""
        with self._lock:
            if report != self._report:
                self._wake.set()
            self._report = report
            if endings and report.generation not in self._endings:
                self._endings[report.generation] = endings_to_json(endings)
                self._wake.set()

    def beat(self) -> None:
        """Have the thread write that the agent's loop goes on."""
        with self._lock:
            self._beat += 1

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

    def places(self) -> Mapping[str, str]:
        """What the thread has read last of the other members, or of all nodes."""
        with self._lock:
            reports = [record.report for record in self._nodes.values()]
            others = [report for report in reports if report.node_id != self._report.node_id]
            generation = self._report.generation
            return {
                report.host: report.places for report in others if report.places and report.generation == generation
            }

    def refused(self) -> Sequence[str]:
        """What the thread has read last of nodes that could not take part."""
        with self._lock:
            return self._refused

    def silent_s(self) -> float:
        """For how long the coordinator has not been heard. Replaces the thread when the store does not answer it."""
        now_s = time.monotonic()
        with self._lock:
            stuck = now_s - self._busy_since_s > self._suspect_after_s
            silent_s = self._heard.for_s(now_s)
        if stuck:
            self._start_thread()
        return silent_s

    def close(self) -> None:
        """Write what was reported last, if that is possible within a second, and end the thread."""
        with self._lock:
            writes = self._writes
            self._wake.set()
        end_s = time.monotonic() + 1.0
        while time.monotonic() < end_s and self._writes < writes + 2 and self.silent_s() < self._suspect_after_s:
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
        store: ConnectedStore | None = None
        while True:
            with self._lock:
                if number != self._thread_number:
                    return
                self._busy_since_s = time.monotonic()
            try:
                if store is None:
                    store = open_store(self._endpoint, self.reached)
                    self._join(store)
                self._write(store, number)
                self._read(store, number)
            except (RuntimeError, OSError, ValueError):
                # What counts is how long it lasts, and the agent looks at that.
                store = None
            self._wake.wait(_EVERY_S)
            self._wake.clear()

    def _join(self, store: ConnectedStore) -> None:
        node_id = self._report.node_id
        if self.is_coordinator and not store.check(["contract"]):
            # The store's process has died, and a new one is empty.
            self._fill(store)
        contract, signature = _contract_in(store.get("contract"), self._contract, self._signature)
        if contract.coordinator != self.coordinator:
            # The coordinator's agent died and another one took over. The plans of the old one mean nothing any more.
            ours, theirs = self._contract, contract
            if self.is_coordinator or (theirs.must_match, theirs.run_dir) != (ours.must_match, ours.run_dir):
                raise OSError("another job uses the store now")
            with self._lock:
                self._contract, self._signature, self._heard = contract, signature, replace(self._heard, said=-1)
                self._plan, self._notices = Plan(generation=contract.generation), ()
                self._endings.clear()
        if node_id not in store.get("nodes").decode().split():
            with self._lock:
                record = self._next_record()
            self._set(store, f"node/{node_id}", record)
            store.append("nodes", f"{node_id} ")

    def _fill(self, store: ConnectedStore) -> None:
        """Write what a store holds from its beginning; what else it held, the nodes write again."""
        with self._lock:
            contract, node_id, record, plan = self._contract, self._report.node_id, self._next_record(), self._plan
            notices, self._notices_written = self._notices, 0
            endings = dict(self._endings)
        for generation, text in endings.items():
            self._set(store, f"endings/{generation}/{node_id}", text)
        self._set(store, f"node/{node_id}", record)
        store.set("nodes", f"{node_id} ")
        for index, notice in enumerate(notices):
            self._set(store, f"notice/{index}", notice_to_json(notice))
        self._set(store, "plan", plan.to_text())
        self._set(store, "contract", contract.to_text())

    def _get(self, store: ConnectedStore, key: str) -> str:
        return self._signature.text_of(key, store.get(key))

    def _set(self, store: ConnectedStore, key: str, text: str) -> None:
        store.set(key, self._signature.sign(key, text))

    def _next_record(self) -> str:
        """This node's record now; the caller holds the lock."""
        self._writes += 1
        return record_text(self._report, self._beat, sorted(self._endings))

    def _write(self, store: ConnectedStore, number: int) -> None:
        with self._lock:
            endings = self._endings.get(self._report.generation)
            generation, node_id = self._report.generation, self._report.node_id
            plan, notices, record = self._plan, self._notices, self._next_record()
        # In this order: a node that reads a record or a plan finds the endings and the notices that it speaks of.
        if endings is not None:
            self._set(store, f"endings/{generation}/{node_id}", endings)
        if self.is_coordinator and number == self._thread_number:
            for index in range(self._notices_written, len(notices)):
                self._set(store, f"notice/{index}", notice_to_json(notices[index]))
            self._notices_written = len(notices)
            self._set(store, "plan", plan.to_text())
        self._set(store, f"node/{node_id}", record)

    def _read(self, store: ConnectedStore, number: int) -> None:
        if self.is_coordinator:
            self._read_nodes(store, store.get("nodes").decode(errors="replace").split(), number)
            refused = refusals(store)
            with self._lock:
                self._refused = refused
            return
        self._read_plan(store, number)
        if self._report.places:
            self._read_nodes(store, [member.node_id for member in self._plan.members], number)

    def _read_plan(self, store: ConnectedStore, number: int) -> None:
        key = f"node/{self.coordinator}"
        plan_text, coordinator = store.multi_get(["plan", key])
        plan = Plan.from_text(self._signature.text_of("plan", plan_text))
        beat = beat_in(self._signature.text_of(key, coordinator))
        if plan.number < self._plan.number:
            raise ValueError("the plan in the store is an old one")
        new = [f"notice/{index}" for index in range(len(self._notices), plan.notices)]
        texts = map(self._signature.text_of, new, store.multi_get(new) if new else ())
        notices = (*self._notices, *map(notice_from_json, texts))
        with self._lock:
            if number == self._thread_number:
                self._plan, self._notices = plan, notices
                if beat > self._heard.said:
                    self._heard = Silence(beat, time.monotonic())

    def _read_nodes(self, store: ConnectedStore, found: Sequence[str], number: int) -> None:
        ids = list(dict.fromkeys(found))[:_MOST_NODES]
        # Reading a key that is not there would wait for it.
        keys = [f"node/{node_id}" for node_id in ids]
        if not store.check(keys):
            keys = [key for key in keys if store.check([key])]
        texts = store.multi_get(keys)
        now_s = time.monotonic()
        records = dict(self._nodes)
        for key, text in zip(keys, texts, strict=True):
            node_id = key.partition("/")[2]
            with contextlib.suppress(ValueError):
                values = object_from(self._signature.text_of(key, text))
                records[node_id] = self._nodes.get(node_id, UNKNOWN).update(values, now_s)
        # What is not there, or cannot be read, is silence.
        records = {node_id: replace(record, read_s=now_s) for node_id, record in records.items()}
        for node_id, record in records.items():
            generation = record.report.generation
            if generation in record.written and record.endings_of != generation:
                key = f"endings/{generation}/{node_id}"
                if store.check([key]):
                    endings = endings_from_json(self._get(store, key))
                    records[node_id] = replace(record, endings_of=generation, endings=endings)
        with self._lock:
            if number == self._thread_number:
                self._nodes = records
                if self.is_coordinator:
                    self._heard = self._heard.restarted(now_s)


def _contract_in(value: bytes, known: JobContract, signature: Signature) -> tuple[JobContract, Signature]:
    """The contract that the store holds as ``value``, and the signature of its launch, which may be a newer one.

    Raises:
        ValueError: if nobody who knows the secret has signed it.
        OSError: if it is of a launch that is not the newest one.
    """
    text = value.decode(errors="replace")
    coordinator = JobContract.from_text(text.partition(" ")[2]).coordinator
    if coordinator != known.coordinator and not is_newest_coordinator(Path(known.run_dir), coordinator):
        raise OSError("the store holds the contract of another launch")
    signature = signature.of_launch(coordinator)
    return JobContract.from_text(signature.text_of("contract", text)), signature


def create_store(
    endpoint: Endpoint,
    contract: JobContract,
    report: NodeReport,
    signature: Signature,
    *,
    suspect_after_s: float,
    stopped: Callable[[], bool] = lambda: False,
) -> TcpStoreClient:
    """Fill a new store with its first values, as its coordinator.

    Raises:
        LaunchError: if the store does not answer within a minute.
        StoppedWaiting: if ``stopped``, before it has answered.
    """
    end_s = time.monotonic() + _CREATE_S
    while True:
        try:
            store = ask_store(endpoint, lambda connected: connected, stopped)
            break
        except (RuntimeError, OSError) as error:
            if time.monotonic() > end_s:
                raise LaunchError(f"the store of the job's nodes does not answer at {endpoint}: {error}") from error
        time.sleep(0.1)
    values = {
        f"node/{report.node_id}": record_text(report, 0, ()),
        "plan": Plan(generation=contract.generation).to_text(),
        "contract": contract.to_text(),
    }
    # The coordinator is the first node, since its ranks come first.
    store.set("nodes", f"{report.node_id} ")
    for key, text in values.items():
        store.set(key, signature.sign(key, text))
    return TcpStoreClient(endpoint, contract, report, signature, suspect_after_s=suspect_after_s)
