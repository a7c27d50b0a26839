"""Where the nodes of a job lay what they say, and read what the others said.

    node n1, whose host is the endpoint                       node n2
    agent ── thread ──►  store, a process of its own  ◄── thread ── agent
    chair                seats   who came, in order           reads the plan, and that the chair lives
                         line/*  each node's, with a beat
                         plan    the chair's

It is torch's own key-value store. A call to it may last as long as the network pleases, so a thread makes all calls,
and the agent only ever looks at what the thread brought last. A store that does not answer is given up and asked anew.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Final, Literal, Protocol

from lockstep.errors import LaunchError, SettingError
from lockstep.launch.child_process import stops_held
from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch.diagnosis.root_cause import RankExit
from lockstep.launch.host import holder_of
from lockstep.launch.rendezvous.membership import Line, Plan, Seat
from lockstep.launch.workers.fork_server import with_this_package

_EVERY_S = 0.2  #: how often the thread posts and reads, at least
_CONNECT_S = 2.0
_ANSWER_S = 5.0
_SAID_EVERY_S = (3.0, 60.0)
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


class Table(Protocol):
    """What an agent needs of a table."""

    @property
    def chairs(self) -> bool:
        """Whether this agent decides for all."""
        ...

    @property
    def chair(self) -> str:
        """The seat that does; another one once a new agent holds the table."""
        ...

    def post(self, line: Line, endings: Sequence[RankExit]) -> None:
        """What this node says from now on; ``endings`` once all ranks of ``line.generation`` have ended."""
        ...

    def seats(self) -> Sequence[Seat]:
        """All nodes that ever came, in the order of their coming. The chair's to ask."""
        ...

    def publish(self, plan: Plan) -> None:
        """What all nodes do from now on. The chair's to say."""
        ...

    def plan(self) -> Plan:
        """What to do, as far as it is known here."""
        ...

    def silent_s(self) -> float:
        """How long nothing was heard of the chair."""
        ...

    def close(self) -> None:
        """Nothing more is said."""
        ...


class Alone:
    """The table of one machine: two variables."""

    chairs = True
    chair = "alone"

    def __init__(self) -> None:
        self._seat = Seat(Line(self.chair, "", 0))
        self._plan = Plan()

    def post(self, line: Line, endings: Sequence[RankExit]) -> None:
        """See `Table`."""
        self._seat = Seat(line, 0.0, tuple(endings))

    def seats(self) -> Sequence[Seat]:
        """See `Table`."""
        return [self._seat]

    def publish(self, plan: Plan) -> None:
        """See `Table`."""
        self._plan = plan

    def plan(self) -> Plan:
        """See `Table`."""
        return self._plan

    def silent_s(self) -> float:
        """See `Table`."""
        return 0.0

    def close(self) -> None:
        """See `Table`."""


@dataclass(frozen=True, slots=True)
class Creed:
    """What all nodes of a job must agree in, and what the others take over from the chair."""

    chair: str  #: its seat
    host: str
    must: Mapping[str, str]  #: in words, by name: versions, program, settings
    run_dir: str
    begins: Literal["new", "resume", "fresh"]
    generation: int

    def to_json(self) -> str:
        """For a table."""
        return json.dumps(asdict(self))


def differences(ours: Mapping[str, str], host: str, theirs: Mapping[str, str], their_host: str) -> list[str]:
    """In what this node differs from the one that holds the table, such as ``torch is 2.11 on n2, 2.12 on n1``."""
    return [
        f"{name} is {ours.get(name, 'none')} on {host}, {theirs.get(name, 'none')} on {their_host}"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the table is."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def addresses(self) -> list[tuple[Any, ...]]:
        """What its name stands for.

        Raises:
            SettingError: if it stands for nothing here.
        """
        try:
            return socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise SettingError(
                f"cannot resolve '{self.host}' from node {socket.gethostname()} ({error.strerror}); give "
                "--rdzv-endpoint a name or an address that every node knows"
            ) from error

    def claim(self) -> socket.socket | None:
        """A socket that listens there, if that is on this host and nobody else does.

        Raises:
            SettingError: if a program that is none of ours is seen to use the port.
        """
        for family, kind, _, _, address in self.addresses():
            with socket.socket(family, kind) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    tried.bind((address[0], 0))
                except OSError:
                    continue  # an address of another host
            # A name may stand for the loopback here and for the network elsewhere.
            local = self.host in ("localhost", "127.0.0.1", "::1")
            try:
                return socket.create_server((address[0] if local else "", self.port), family=family, backlog=1024)
            except OSError as error:
                holder = holder_of(self.port) if error.errno == errno.EADDRINUSE else None
                if holder is not None and "lockstep" not in holder[1]:
                    raise SettingError(
                        f"port {self.port} of this machine is used by process {holder[0]} ({holder[1]:.60}); "
                        f"give another one to all nodes: --rdzv-endpoint {self.host}:PORT"
                    ) from error
                return None
        return None

    def reach(self) -> str:
        """This host's address on the way there; "" if there is no way."""
        with contextlib.suppress(OSError, SettingError):
            family, _, _, _, address = self.addresses()[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        return ""

    def answers(self, timeout_s: float = _CONNECT_S) -> str:
        """Why no connection can be made; "" if one can."""
        try:
            socket.create_connection((self.host, self.port), timeout_s).close()
        except OSError as error:
            return error.strerror or str(error) or type(error).__name__
        return ""


class Keeper:
    """The process that keeps the store of a table."""

    def __init__(self, listening: socket.socket, command: Callable[[int, int], list[str]]) -> None:
        """``command`` starts it, given the descriptor and the port of ``listening``."""
        with listening:
            os.set_inheritable(listening.fileno(), True)
            with stops_held():
                self._process: Final = subprocess.Popen(
                    command(listening.fileno(), listening.getsockname()[1]),
                    env=with_this_package({**os.environ, _LOG_LEVEL: "ERROR"}),
                    pass_fds=[listening.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )

    def close(self) -> None:
        """The table is gone."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


class Shared:
    """A table on a store; `join` or `found` make one."""

    def __init__(self, endpoint: Endpoint, creed: Creed, line: Line, *, lost_after_s: float) -> None:
        self.chairs: Final = line.seat == creed.chair
        self._creed = creed
        self._endpoint, self._lost_after_s = endpoint, lost_after_s
        self._lock: Final = threading.Lock()
        self._wake: Final = threading.Event()
        self._line: Line = line
        self._reports: dict[int, str] = {}  # by generation: our endings, to be laid on the table
        self._plan = Plan(generation=creed.generation)
        self._seats: dict[str, _Heard] = {}
        self._beat = 0
        self._chair_beat = -1
        self._heard_s = self._busy_since_s = time.monotonic()
        self._thread_number = 0
        self._exchange_anew()

    @property
    def chair(self) -> str:
        """See `Table`."""
        return self._creed.chair

    def post(self, line: Line, endings: Sequence[RankExit]) -> None:
        """See `Table`."""
        with self._lock:
            if line != self._line:
                self._wake.set()
            self._line = line
            if endings and line.generation not in self._reports:
                self._reports[line.generation] = json.dumps([asdict(ending) for ending in endings])
                self._wake.set()

    def seats(self) -> Sequence[Seat]:
        """See `Table`."""
        with self._lock:
            return [heard.seat() for heard in self._seats.values()]

    def publish(self, plan: Plan) -> None:
        """See `Table`."""
        with self._lock:
            if plan != self._plan:
                self._wake.set()
            self._plan = plan

    def plan(self) -> Plan:
        """See `Table`."""
        with self._lock:
            return self._plan

    def silent_s(self) -> float:
        """See `Table`. Where the store itself is silent this asks it anew."""
        now_s = time.monotonic()
        with self._lock:
            stuck = now_s - self._busy_since_s > self._lost_after_s
            silent_s = now_s - self._heard_s
        if stuck:
            self._exchange_anew()
        return silent_s

    def close(self) -> None:
        """See `Table`. What was posted last is laid down first, if that is possible within a second."""
        with self._lock:
            beat = self._beat
            self._wake.set()
        end_s = time.monotonic() + 1.0
        while time.monotonic() < end_s and self._beat < beat + 2 and self.silent_s() < self._lost_after_s:
            time.sleep(0.02)
        with self._lock:
            self._thread_number = -1
            self._wake.set()

    def _exchange_anew(self) -> None:
        with self._lock:
            self._thread_number += 1
            self._busy_since_s = time.monotonic()
            number = self._thread_number
        threading.Thread(target=self._exchange, args=(number,), name="lockstep table", daemon=True).start()

    def _exchange(self, number: int) -> None:
        store: Any = None
        while True:
            with self._lock:
                if number != self._thread_number:
                    return
                self._busy_since_s = time.monotonic()
            try:
                if store is None:
                    store = open_store(self._endpoint)
                    self._enrol(store)
                self._lay_down(store, number)
                self._pick_up(store, number)
            except (RuntimeError, OSError, ValueError):
                # How long it lasts is what counts, and the agent looks at that.
                store = None
            self._wake.wait(_EVERY_S)
            self._wake.clear()

    def _enrol(self, store: Any) -> None:
        seat, creed = self._line.seat, Creed(**json.loads(store.get("creed")))
        if creed.chair != self.chair:
            # The chair's agent died and another took its place. What we know of the old one's plans means nothing.
            if self.chairs or (creed.must, creed.run_dir) != (self._creed.must, self._creed.run_dir):
                raise OSError("another job holds the table now")
            with self._lock:
                self._creed, self._chair_beat = creed, -1
                self._reports.clear()
        if seat not in store.get("seats").decode().split():
            store.set(f"line/{seat}", self._said())
            store.append("seats", f"{seat} ")

    def _said(self) -> str:
        with self._lock:
            self._beat += 1
            return _said(self._line, self._beat, sorted(self._reports))

    def _lay_down(self, store: Any, number: int) -> None:
        with self._lock:
            reports = dict(self._reports)
            plan = self._plan.to_json()
        # In this order: whoever reads the line finds the report that it speaks of.
        for generation, report in reports.items():
            if generation == self._line.generation:
                store.set(f"report/{generation}/{self._line.seat}", report)
        if self.chairs and number == self._thread_number:
            store.set("plan", plan)
        store.set(f"line/{self._line.seat}", self._said())

    def _pick_up(self, store: Any, number: int) -> None:
        if not self.chairs:
            plan, chair = store.multi_get(["plan", f"line/{self.chair}"])
            beat = json.loads(chair)["beat"]
            with self._lock:
                if number == self._thread_number:
                    self._plan = Plan.from_json(plan.decode())
                    if beat != self._chair_beat:
                        self._chair_beat, self._heard_s = beat, time.monotonic()
            return
        names = store.get("seats").decode().split()
        told = [json.loads(line) for line in store.multi_get([f"line/{name}" for name in names])]
        now_s = time.monotonic()
        heard = {name: self._seats.get(name, _NOTHING).hear(one, now_s) for name, one in zip(names, told, strict=True)}
        for name, one in heard.items():
            if one.line.generation in one.reports and one.reported != one.line.generation:
                text = store.get(f"report/{one.line.generation}/{name}").decode()
                heard[name] = replace(one, reported=one.line.generation, endings=_endings(text))
        with self._lock:
            if number == self._thread_number:
                self._seats, self._heard_s = heard, now_s


def _said(line: Line, beat: int, reports: Sequence[int]) -> str:
    return json.dumps({"line": asdict(line), "beat": beat, "now_s": time.monotonic(), "reports": list(reports)})


@dataclass(frozen=True, slots=True)
class _Heard:
    """What the chair's thread knows of one node."""

    line: Line
    beat: int = -1
    since_s: float = 0.0  #: of the beat, on our clock
    looked_s: float = 0.0
    ahead_s: float = float("inf")  #: of our clock before its; too large by how long its word took to come
    reports: tuple[int, ...] = ()
    reported: int = -1
    endings: tuple[RankExit, ...] = ()

    def hear(self, told: Mapping[str, Any], now_s: float) -> _Heard:
        new = told["beat"] != self.beat
        return replace(
            self,
            line=Line(**told["line"]),
            beat=told["beat"],
            since_s=now_s if new else self.since_s,
            looked_s=now_s,
            ahead_s=min(self.ahead_s, now_s - told["now_s"]) if new else self.ahead_s,
            reports=tuple(told["reports"]),
        )

    def seat(self) -> Seat:
        # Silence counts up to the last look, not up to now: who has been asleep knows nothing of the others.
        silent_s = self.looked_s - self.since_s
        ours = self.endings if self.reported == self.line.generation else ()
        return Seat(self.line, silent_s, tuple(_at_our_time(ending, self.ahead_s) for ending in ours))


_NOTHING: Final = _Heard(Line("", "", 0))


def _at_our_time(ending: RankExit, ahead_s: float) -> RankExit:
    failure = ending.failure and replace(ending.failure, raised_s=ending.failure.raised_s + ahead_s)
    return replace(ending, at_s=ending.at_s + ahead_s, failure=failure)


def _endings(text: str) -> tuple[RankExit, ...]:
    return tuple(
        RankExit(**{**told, "failure": told["failure"] and Failure(**told["failure"])}) for told in json.loads(text)
    )


def open_store(endpoint: Endpoint) -> Any:
    """A connection to the store.

    Raises:
        OSError: if there is no way to it.
        RuntimeError: if what is there is no such store.
    """
    # First by ourselves: torch would try for long, and write of each try.
    socket.create_connection((endpoint.host, endpoint.port), _CONNECT_S).close()
    TCPStore = _torch_store()  # noqa: N806 - a class
    return TCPStore(
        endpoint.host,
        endpoint.port,
        world_size=None,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=_ANSWER_S),
    )


def _torch_store() -> Any:
    """Torch's own, which reads at its first import how much to say: of names that it does not need it says too much."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "ERROR")
    try:
        # Late: the launcher of one machine stays free of torch.
        from torch._C._distributed_c10d import TCPStore  # as torch.distributed hands it on, with types

        return TCPStore
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]


def found(endpoint: Endpoint, creed: Creed, line: Line, *, lost_after_s: float) -> Shared:
    """Lay the first things on a new table, as its chair.

    Raises:
        LaunchError: if its store does not answer.
    """
    end_s = time.monotonic() + 60.0
    while True:
        try:
            store = open_store(endpoint)
            break
        except (RuntimeError, OSError) as error:
            if time.monotonic() > end_s:
                raise LaunchError(f"the store of the nodes' table does not answer at {endpoint}: {error}") from error
        time.sleep(0.1)
    # The chair sits first, for its ranks come first.
    store.set(f"line/{line.seat}", _said(line, 0, ()))
    store.set("seats", f"{line.seat} ")
    store.set("plan", Plan(generation=creed.generation).to_json())
    store.set("creed", creed.to_json())
    return Shared(endpoint, creed, line, lost_after_s=lost_after_s)


def read_creed(
    endpoint: Endpoint, *, within_s: float, say: Callable[[str], None], stopped: Callable[[], bool]
) -> Creed | None:
    """What the node that holds the table says, once it does; None if ``stopped`` first.

    Raises:
        LaunchError: if nobody says anything within ``within_s``, or something else is there.
    """
    start_s = time.monotonic()
    next_word_s, here = _SAID_EVERY_S[0], socket.gethostname()
    why = ""
    while not stopped():
        waited_s = time.monotonic() - start_s
        if waited_s >= within_s:
            raise LaunchError(
                f"node {here} found no table of this job at {endpoint} within {waited_s:.0f} s ({why}); start "
                f"lockstep run on {endpoint.host} too, and see that no firewall closes port {endpoint.port}"
            )
        if waited_s >= next_word_s:
            say(f"waiting for {endpoint}, where the nodes meet: {why} ({waited_s:.0f} s)")
            next_word_s = min(2 * next_word_s, next_word_s + _SAID_EVERY_S[1])
        try:
            return Creed(**json.loads(open_store(endpoint).get("creed")))
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
        except (RuntimeError, ValueError) as error:
            why = f"something else may use the port: {str(error).splitlines()[0]}"
        time.sleep(0.1)
    return None
