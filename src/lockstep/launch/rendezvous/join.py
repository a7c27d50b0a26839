"""How this agent is joined to those of the other nodes, or that there are none.

--rdzv-endpoint n1:29400        on n1: nobody listens there yet, so this agent does: it holds the table, is the
chair, and its run directory is the job's
elsewhere: go there, compare what must be equal, take the run directory over
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.errors import SettingError
from lockstep.launch.host import interface_of
from lockstep.launch.rendezvous.membership import Line, Plan, Rules
from lockstep.launch.rendezvous.store import (
    Alone,
    Creed,
    Endpoint,
    Keeper,
    Shared,
    Table,
    differences,
    found,
    read_creed,
)
from lockstep.launch.request import Function, Nodes, Request
from lockstep.launch.run_directory import Job, versions
from lockstep.launch.workers.fork_server import own_python
from lockstep.launch.workers.rank_environment import INTERFACES
from lockstep.launch.workers.worker_group import Spot

#: How long a shared file system may take to show one node what another one wrote.
_SEEN_S = 20.0
_SEAT = ".chair"
_ASK_S = 2.0
#: A host that is up answers there, or refuses.
_ANY_PORT = 22


@dataclass(frozen=True, slots=True)
class Joined:
    """What an agent needs to act as one of its job's."""

    job: Job
    table: Table
    line: Line
    rules: Rules
    spot: Callable[[Plan, socket.socket | None], Spot]
    inquire: Callable[[str], str]


def single_rank_group(job: Job) -> Joined:
    """On the only node."""
    rules = Rules(max_restarts=job.request.max_restarts)
    line = Line(Alone.chair, socket.gethostname(), job.ranks)
    return Joined(job, Alone(), line, rules, lambda _, meeting: Spot(0, "127.0.0.1", meeting), lambda _: "")


def preside(
    job: Job, nodes: Nodes, endpoint: Endpoint, listening: socket.socket, stack: contextlib.ExitStack
) -> Joined:
    """Hold the table of a job whose run directory is settled; ``stack`` ends it."""
    line = Line(uuid.uuid4().hex, socket.gethostname(), job.ranks)
    creed = Creed(
        chair=line.seat,
        host=line.host,
        must=_must(job.request, nodes),
        run_dir=str(job.run_dir),
        begins=job.begins,
        generation=job.generation,
    )
    (job.run_dir / _SEAT).write_text(line.seat, encoding="ascii")
    keeper = Keeper(listening, lambda passed, port: own_python("tcp-store", [str(passed), str(port), str(os.getpid())]))
    stack.enter_context(contextlib.closing(keeper))
    table = found(endpoint, creed, line, lost_after_s=nodes.lost_after_s)
    return _seated(job, nodes, endpoint, table, line)


def join(
    job: Job, nodes: Nodes, endpoint: Endpoint, *, say: Callable[[str], None], stopped: Callable[[], bool]
) -> Joined | None:
    """Sit down at the table that another node holds; None if ``stopped`` before that.

    Raises:
        SettingError: if this node differs from that one in what must be equal, or does not see the run directory.
        LaunchError: if there is no table within the time for it.
    """
    creed = read_creed(endpoint, within_s=nodes.join_timeout_s, say=say, stopped=stopped)
    if creed is None:
        return None
    host = socket.gethostname()
    # A second agent on one machine, as in a rehearsal, needs a name of its own.
    name = f"{host}#{os.getpid()}" if host == creed.host else host
    if other := differences(_must(job.request, nodes), name, creed.must, creed.host):
        raise SettingError(f"this node cannot take part in the job at {endpoint}: {'; '.join(other)}")
    run_dir = Path(creed.run_dir)
    _see(run_dir, creed, name)
    given = job.request.run_dir
    if given is not None and Path(given).absolute() != run_dir:
        say(f"note: the run directory is {run_dir}, as {creed.host} says, and not {given}")
    job = replace(job, run_dir=run_dir, begins=creed.begins, generation=creed.generation)
    line = Line(uuid.uuid4().hex, name, job.ranks, endpoint.reach())
    table = Shared(endpoint, creed, line, lost_after_s=nodes.lost_after_s)
    return _seated(job, nodes, endpoint, table, line)


def _seated(job: Job, nodes: Nodes, endpoint: Endpoint, table: Shared, line: Line) -> Joined:
    return Joined(
        job,
        table,
        line,
        _rules(job.request, nodes),
        _finder(endpoint, line),
        lambda host: inquire(host, nodes.endpoint),
    )


def _rules(request: Request, nodes: Nodes) -> Rules:
    # Who neither allows other numbers of nodes nor restarts wants the job to end when it breaks.
    fixed = nodes.least == nodes.most and not request.max_restarts
    return Rules(
        least=nodes.least,
        most=nodes.most,
        max_restarts=request.max_restarts,
        max_changes=0 if fixed else nodes.max_changes,
        join_timeout_s=nodes.join_timeout_s,
        lost_after_s=nodes.lost_after_s,
        last_call_s=nodes.last_call_s,
        expected=nodes.hosts,
    )


def _must(request: Request, nodes: Nodes) -> Mapping[str, str]:
    """What all nodes must have in common, in words."""
    program = request.program
    assert not isinstance(program, Function), "functions run on one machine"
    return {
        "the run's id": nodes.run_id or "not given",
        "the program": shlex.join([program.name, *program.args]),
        "the settings": " ".join(f"{name}={value}" for name, value in sorted(request.settings.items())) or "none",
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: versions()[name] or "none" for name in ("lockstep", "torch")},
    }


def _see(run_dir: Path, creed: Creed, host: str) -> None:
    end_s = time.monotonic() + _SEEN_S
    while True:
        with contextlib.suppress(OSError):
            if (run_dir / _SEAT).read_text(encoding="ascii") == creed.chair:
                return
        if time.monotonic() > end_s:
            raise SettingError(
                f"{host} does not see the run directory of {creed.host}, {run_dir}: all nodes need the same one, for "
                "logs and checkpoints; give one on a file system that they share, with --run-dir"
            )
        time.sleep(0.1)


def _finder(endpoint: Endpoint, line: Line) -> Callable[[Plan, socket.socket | None], Spot]:
    def spot(plan: Plan, meeting: socket.socket | None) -> Spot:
        place = plan.place(line.seat)
        assert place is not None, "only a member has a place"
        interface = ""
        if not any(name in os.environ for name in INTERFACES):
            # The chair's own name may stand for its loopback; the way to another node does not.
            others = [member.address for member in plan.members if member.address and member.seat != line.seat]
            here = line.address or (Endpoint(others[0], endpoint.port).reach() if others else "127.0.0.1")
            interface = interface_of(here)
        return Spot(place, endpoint.host, meeting, line.host, interface)

    return spot


def inquire(host: str, endpoint: str) -> str:
    """Why ``host`` may not have come to ``endpoint``, in one line; takes up to 2 s."""
    try:
        address = str(socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return f"{host} is missing: its name cannot be resolved here ({error.strerror})"
    try:
        socket.create_connection((address, _ANY_PORT), _ASK_S).close()
    except ConnectionRefusedError:
        pass
    except OSError as error:
        return f"{host} ({address}) is missing: the network does not reach it ({error.strerror or error})"
    return (
        f"{host} ({address}) is missing: the network reaches it, but no lockstep run came from there; look at what it "
        f"said there, and whether it reaches {endpoint}"
    )
