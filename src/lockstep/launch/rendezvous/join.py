"""How this agent joins those of the other nodes, or that there are none.

--rdzv-endpoint n1:29400        on n1: no launcher listens there yet, so this agent serves the store and is the
coordinator, and its run directory is the job's
elsewhere: connect to the store, compare what must be equal, and take the run directory over
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from lockstep.errors import SettingError
from lockstep.formatting import command_line
from lockstep.launch.diagnosis.part_monitor import PartMonitor
from lockstep.launch.diagnosis.root_cause import how_it_ended
from lockstep.launch.host.child_process import own_python, stop_signals_blocked, with_this_package
from lockstep.launch.host.timed_calls import FileThread, TaskThread, call_in_time, done_within
from lockstep.launch.job.program_sources import source_hashes
from lockstep.launch.job.request import Function, Nodes, Request
from lockstep.launch.rendezvous.endpoint import Endpoint, listen
from lockstep.launch.rendezvous.job_contract import (
    COORDINATOR_FILE,
    JobContract,
    Signature,
    differences,
    is_newest_coordinator,
    make_signature,
    read_signature,
)
from lockstep.launch.rendezvous.lease import Lease, LeaseFiles
from lockstep.launch.rendezvous.plan import ElasticLimits, NodePlacement, NodeReport, Plan
from lockstep.launch.rendezvous.store import LocalStore, RendezvousStore
from lockstep.launch.rendezvous.store_connection import LOG_LEVEL, read_contract, tell_refused
from lockstep.launch.rendezvous.takeover import LeaseFollower, LeaseHolder, Takeover
from lockstep.launch.rendezvous.tcp_store_client import TcpStoreClient, create_store
from lockstep.launch.run_dir.run_directory import Job
from lockstep.launch.timeouts import NodeTimeouts
from lockstep.network_interface import INTERFACES, address_towards, interface_of, own_addresses
from lockstep.provenance import versions

#: How long a shared file system may take to show one node what another one wrote.
_VISIBLE_S = 20.0
_PROBE_S = 2.0
#: Changes of nodes that a job bears, unless the user says otherwise.
_MAX_CHANGES = 10
#: A host that is up accepts or refuses a connection there.
_PROBE_PORT = 22
_MOST_PROBES = 64
#: Torch's ranks speak another protocol where this differs.
_MUST_MATCH = ("TORCH_DISTRIBUTED_DEBUG",)
#: Of those by which kernels are chosen the bits depend.
_OF_TORCH = ("TORCH_", "NCCL_", "GLOO_", "TP_", "ATEN_", "MKL_", "OMP_", "DNNL_", "ONEDNN_")
_OF_ONE_HOST = re.compile(r"IFNAME|_HCA|_DEBUG|_LOG|TOPO_FILE|_DIR|_HOME|_PATH|HOST|_CACHE|_FR_")
_STORE = "the store where the launchers meet"


@dataclass(frozen=True, slots=True)
class Joined:
    """What an agent needs to carry out its part of a job."""

    job: Job
    store: RendezvousStore
    report: NodeReport  #: this node's first one
    limits: ElasticLimits
    #: Where this node's ranks meet the others in a generation; the socket is the store's, on the node that has it.
    place: Callable[[Plan, socket.socket | None], NodePlacement]
    #: Say why expected hosts may not have joined.
    probe: Callable[[Sequence[str]], list[str]]
    #: Listens for the store of the next generation, where this node is the coordinator.
    listen: Callable[[], socket.socket]
    #: Looks after what this node serves to the others; to be called often.
    look_after: Callable[[], None]
    #: What this node does so that the job survives the loss of its coordinator.
    takeover: Callable[[FileThread], Takeover] = lambda _: Takeover()
    #: How the user continues the job without its coordinator, in words; "": there is nothing to say.
    without_coordinator: str = ""


def join_alone(job: Job) -> Joined:
    """Carry out a job on one machine only."""
    limits = ElasticLimits(max_restarts=job.request.max_restarts, refill_after_s=job.request.refill_after_s)
    report = NodeReport(LocalStore.coordinator, socket.gethostname(), job.ranks)
    return Joined(
        job,
        LocalStore(),
        report,
        limits,
        place=lambda _, listening: NodePlacement(0, "127.0.0.1", listening),
        probe=lambda _: [],
        listen=lambda: listen(socket.AF_INET, ("127.0.0.1", 0)),
        look_after=lambda: None,
    )


def host_job(
    job: Job,
    endpoint: Endpoint,
    listening: socket.socket,
    stack: contextlib.ExitStack,
    lease: Lease | None = None,
    *,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
) -> Joined:
    """Become the coordinator of a job whose run directory is ready.

    The store is served behind ``listening`` until ``stack`` is closed. ``lease`` is that with which this node has taken
    over; None: it makes one, where nodes may take over.

    Raises:
        SettingError: if the secret of the run is not its user's alone, or another node has become the coordinator.
        StoppedWaiting: if ``stopped`` before the store answers.
    """
    nodes = _nodes_of(job)
    report = NodeReport(
        uuid.uuid4().hex, socket.gethostname(), job.ranks, addresses=own_addresses(), node_rank=nodes.node_rank
    )
    leases, claimed_s, made = LeaseFiles(job.run_dir), time.monotonic(), lease

    def begin() -> tuple[Signature, Lease | None]:
        signature = make_signature(job.run_dir, os.environ).of_launch(report.node_id)
        new = leases.claim(report.node_id, report.host, str(endpoint)) if nodes.takeover and made is None else made
        (job.run_dir / COORDINATOR_FILE).write_text(report.node_id, encoding="ascii")
        return signature, new

    signature, lease = call_in_time(begin, f"the run directory {job.run_dir}", say, stopped)
    if nodes.takeover and lease is None:
        raise SettingError(f"another node has become the coordinator in {job.run_dir}; start this one again")
    contract = JobContract(
        coordinator=report.node_id,
        host=report.host,
        must_match=_must_match(job.request, nodes),
        run_dir=str(job.run_dir),
        begins=job.begins,
        generation=job.generation,
        term=0 if lease is None else lease.term,
        variables=_variables(os.environ),
    )
    process = stack.enter_context(contextlib.closing(StoreProcess(listening, say)))
    store = create_store(endpoint, contract, report, signature, suspect_after_s=nodes.suspect_after_s, stopped=stopped)
    times = NodeTimeouts(nodes.lost_after_s)
    # The ranks meet where the launchers do: what reaches the one reaches the other, and nothing else listens.
    host, _, *more = listening.getsockname()
    family = listening.family
    joined = _joined(job, nodes, endpoint, store, report)
    joined = replace(joined, listen=lambda: listen(family, (host, 0, *more)), look_after=process.look_after)
    if lease is None:
        return joined
    held = lease
    return replace(joined, takeover=lambda files: LeaseHolder(held, claimed_s, leases, times, files))


def join_job(job: Job, endpoint: Endpoint, *, say: Callable[[str], None], stopped: Callable[[], bool]) -> Joined:
    """Join the job of the coordinator at ``endpoint``, who is told if this node cannot take part.

    Raises:
        SettingError: if this node differs from that one in what must be equal, or does not see the run directory.
        LaunchError: if there is no store at the endpoint in time.
        StoppedWaiting: if ``stopped`` before that.
    """
    try:
        return _join(job, endpoint, say=say, stopped=stopped)
    except SettingError as error:
        tell_refused(endpoint, str(error))
        raise


def _join(job: Job, endpoint: Endpoint, *, say: Callable[[str], None], stopped: Callable[[], bool]) -> Joined:
    nodes, host = _nodes_of(job), socket.gethostname()

    def sign(contract: JobContract) -> Signature:
        run_dir = Path(contract.run_dir)

        def look() -> Signature:
            _wait_for_run_dir(run_dir, contract, host)
            return read_signature(run_dir, os.environ).of_launch(contract.coordinator)

        return call_in_time(look, f"the run directory {run_dir}", say, stopped)

    version = str(versions()["lockstep"])
    contract, signature = read_contract(
        endpoint, sign, version=version, within_s=nodes.join_timeout_s, say=say, stopped=stopped
    )
    # A second agent on one machine, as in a rehearsal, needs a name of its own.
    name = f"{host}#{os.getpid()}" if host == contract.host else host
    if found := differences(_must_match(job.request, nodes), name, contract.must_match, contract.host):
        raise SettingError(f"this node cannot take part in the job at {endpoint}: {'; '.join(found)}")
    for found_once in differences(_variables(os.environ), name, contract.variables, contract.host):
        say(
            f"note: {found_once}; where torch's ranks do not agree on such a variable they may wait for ever, or "
            "compute other bits"
        )
    run_dir = Path(contract.run_dir)
    given = job.request.run_dir
    if given is not None and Path(given).absolute() != run_dir:
        say(f"note: the run directory is {run_dir}, as {contract.host} says, and not {given}")
    job = replace(job, run_dir=run_dir, begins=contract.begins, generation=contract.generation)
    address = endpoint.local_address()
    report = NodeReport(uuid.uuid4().hex, name, job.ranks, address, own_addresses(), nodes.node_rank)
    store = TcpStoreClient(endpoint, contract, report, signature, suspect_after_s=nodes.suspect_after_s)
    joined = _joined(job, nodes, endpoint, store, report)
    if not contract.term:
        there, here = job.to_resume, job.to_resume_at(str(Endpoint(address, endpoint.port)))
        how = f"to go on, on {contract.host}: {there}\n    without {contract.host}, on each other machine: {here}"
        return replace(joined, without_coordinator=how)
    directory, times = LeaseFiles(run_dir), NodeTimeouts(nodes.lost_after_s)
    return replace(
        joined,
        takeover=lambda files: LeaseFollower(
            lambda: store.term,
            report.node_id,
            host,
            partial(_listen_here, address, endpoint.port),
            directory,
            times,
            files,
        ),
        without_coordinator="another node takes over unless it comes back",
    )


def _listen_here(address: str, port: int) -> socket.socket:
    """Listen on this host's ``address``, at ``port`` if that is free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return listen(family, (address, port))
    except OSError:
        return listen(family, (address, 0))


def _nodes_of(job: Job) -> Nodes:
    assert job.request.nodes is not None, "a job of several nodes"
    return job.request.nodes


def _joined(job: Job, nodes: Nodes, endpoint: Endpoint, store: TcpStoreClient, report: NodeReport) -> Joined:
    return Joined(
        job,
        store,
        report,
        limits_of(job.request, nodes),
        place=lambda plan, listening: _placement(plan, endpoint, store.reached.address, report, listening),
        probe=lambda hosts: probe_all(hosts, nodes.endpoint),
        listen=_not_here,
        look_after=lambda: None,
    )


def _not_here() -> NoReturn:
    raise AssertionError("only the coordinator serves the store of a generation")


def limits_of(request: Request, nodes: Nodes) -> ElasticLimits:
    """What the user allows a job on several nodes."""
    max_changes = nodes.max_changes
    if max_changes is None:
        # A user who allows neither other numbers of nodes nor restarts wants the job to end when it breaks.
        max_changes = 0 if nodes.min_nodes == nodes.max_nodes and not request.max_restarts else _MAX_CHANGES
    return ElasticLimits(
        min_nodes=nodes.min_nodes,
        max_nodes=nodes.max_nodes - nodes.spares,
        max_restarts=request.max_restarts,
        max_changes=max_changes,
        join_timeout_s=nodes.join_timeout_s,
        lost_after_s=nodes.lost_after_s,
        suspect_after_s=nodes.suspect_after_s,
        refill_after_s=request.refill_after_s,
        hands_over=nodes.takeover,
        last_call_s=nodes.last_call_s,
        expected=nodes.hosts,
    )


def _must_match(request: Request, nodes: Nodes) -> Mapping[str, str]:
    """What must be equal on all nodes, by the name that an error shows."""
    program = request.program
    assert not isinstance(program, Function), "functions run on one machine"
    return {
        "the run's id": nodes.run_id or "not given",
        "--rdzv-takeover": "given" if nodes.takeover else "not given",
        # Without secrets: whoever reaches the store reads this.
        "the program": command_line([program.name, *program.args]),
        "the settings": command_line([f"{name}={value}" for name, value in sorted(request.settings.items())]) or "none",
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: versions()[name] or "none" for name in ("lockstep", "torch")},
        **{f"the file {name} (SHA-256)": digest for name, digest in source_hashes(program).items()},
        **{name: os.environ[name] for name in _MUST_MATCH if name in os.environ},
    }


def _variables(env: Mapping[str, str]) -> Mapping[str, str]:
    """What ``env`` tells torch, its kernels, NCCL and gloo, but for what names a host's own devices, files and logs."""
    return {
        name: value
        for name, value in env.items()
        if name.startswith(_OF_TORCH) and name not in _MUST_MATCH and not _OF_ONE_HOST.search(name)
    }


def _wait_for_run_dir(run_dir: Path, contract: JobContract, host: str) -> None:
    end_s = time.monotonic() + _VISIBLE_S
    while True:
        if is_newest_coordinator(run_dir, contract.coordinator):
            return
        if time.monotonic() > end_s:
            raise SettingError(
                f"{host} does not see the run directory of {contract.host}, {run_dir}: all nodes need the same one, "
                "for logs and checkpoints; give one on a file system that they share, with --run-dir"
            )
        time.sleep(0.1)


def _placement(
    plan: Plan, endpoint: Endpoint, reached: str, report: NodeReport, listening: socket.socket | None
) -> NodePlacement:
    node_rank = plan.node_rank(report.node_id)
    assert node_rank is not None, "only a member of a generation starts its ranks"
    interface = ""
    if not any(name in os.environ for name in INTERFACES):
        # The coordinator's own name may stand for its loopback; the route to another node does not use that.
        others = [m.address for m in plan.members if m.address and m.node_id != report.node_id]
        own = report.address or (address_towards(others[0], endpoint.port) if others else "127.0.0.1")
        interface = interface_of(own)
    # By the address, so that ranks need no name server: one may be away when they start again.
    return NodePlacement(node_rank, reached or endpoint.host, listening, report.host, interface)


def probe_all(hosts: Sequence[str], endpoint: str) -> list[str]:
    """Why each of ``hosts`` may not have joined at ``endpoint``, as far as it is found out within some seconds."""
    threads = [TaskThread("lockstep probe") for _ in hosts[:_MOST_PROBES]]
    asked = [thread.start(partial(probe, host, endpoint)) for thread, host in zip(threads, hosts, strict=False)]
    end_s = time.monotonic() + 1.5 * _PROBE_S
    found = [task.result() for task in asked if done_within(task, max(0.0, end_s - time.monotonic()))]
    for thread in threads:
        thread.close()
    return found


def probe(host: str, endpoint: str) -> str:
    """Why ``host`` may not have joined at ``endpoint``, in one line; takes up to 2 s."""
    try:
        address = str(socket.getaddrinfo(host, _PROBE_PORT, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return f"{host} is missing: its name cannot be resolved here ({error.strerror})"
    try:
        socket.create_connection((address, _PROBE_PORT), _PROBE_S).close()
    except ConnectionRefusedError:
        pass
    except OSError as error:
        return f"{host} ({address}) is missing: the network does not reach it ({error.strerror or error})"
    return (
        f"{host} ({address}) is missing: the network reaches it, but no lockstep run came from there; look at what it "
        f"said there, and whether it reaches {endpoint}"
    )


class StoreProcess:
    """The store behind a socket that listens already; it lives until `close`, or until this process ends.

    Args:
        listening: stays open, so that who connects while there is no process waits for the next one.
        say: tells the user what befell the process.
    """

    def __init__(self, listening: socket.socket, say: Callable[[str], None]) -> None:
        self._listening: Final = listening.dup()
        self._say = say
        self._monitor = PartMonitor(say)
        self._process = self._start()

    def look_after(self) -> None:
        """Start it anew if it is dead, or stopped for good; to be called often. What it held must be written again."""
        if (status := self._process.poll()) is not None:
            self._say(f"note: {_STORE} {how_it_ended(status)}: starting another one")
            self._process = self._start()
        if self._monitor.poll() is not None:
            self._process.kill()

    def close(self) -> None:
        """Kill the process; returns when it is gone."""
        self._listening.close()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        port = self._listening.getsockname()[1]
        with stop_signals_blocked():
            process = subprocess.Popen(
                own_python("tcp-store", [str(self._listening.fileno()), str(port), str(os.getpid())]),
                env=with_this_package({**os.environ, LOG_LEVEL: "ERROR"}),
                pass_fds=[self._listening.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._monitor.watch({process.pid: _STORE})
        return process
