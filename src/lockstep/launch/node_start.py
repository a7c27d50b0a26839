"""How a launcher takes part in a job on several nodes: as the coordinator, or following another one, also a new one."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.errors import SettingError
from lockstep.formatting import plural, relative_path
from lockstep.launch.agent import Stops
from lockstep.launch.host.machine import Machine, threads_of_rank
from lockstep.launch.host.timed_calls import ScreenThread, call_in_time
from lockstep.launch.job.request import Nodes, Request
from lockstep.launch.rendezvous.endpoint import Endpoint
from lockstep.launch.rendezvous.join import Joined, host_job, join_job
from lockstep.launch.rendezvous.lease import Lease, LeaseFiles
from lockstep.launch.rendezvous.takeover import NewCoordinator, living_holder
from lockstep.launch.run_dir.run_directory import (
    Job,
    lock_if_free,
    next_generation,
    prepare_in_time,
    settle_in_time,
)
from lockstep.launch.schedulers.scheduler import Allocation
from lockstep.launch.terminal.console import Screen, say
from lockstep.launch.timeouts import NodeTimeouts


def running_elsewhere(request: Request, nodes: Nodes) -> NewCoordinator | None:
    """The coordinator of a job that runs already, where another node may have taken over; None if it does not run.

    Raises:
        SettingError: if the run directory is not given, which all nodes must know, or cannot be read.
    """
    if not nodes.takeover:
        return None
    if request.run_dir is None:
        raise SettingError("--rdzv-takeover: say --run-dir DIR, too, the same directory on a file system of all nodes")
    run_dir = Path(request.run_dir).absolute()
    leases = LeaseFiles(run_dir)

    def read() -> Lease | None:
        return call_in_time(leases.newest, f"the run directory {request.run_dir}", say)

    holder = None if request.fresh else living_holder(read, NodeTimeouts(nodes.lost_after_s), time.sleep)
    return None if holder is None else NewCoordinator(holder, None)


@dataclass(frozen=True, slots=True)
class NodePart:
    """This node's part in a job on several nodes."""

    request: Request  #: of the user
    nodes: Nodes  #: of it
    machine: Machine  #: this one
    given: Allocation  #: by a scheduler
    stops: Stops  #: may end the waiting for others

    def take(
        self, moved: NewCoordinator | None, stack: contextlib.ExitStack, signals: contextlib.ExitStack
    ) -> tuple[Joined, ScreenThread]:
        """Take part in the job: as its coordinator where that is this host's part, else as one that follows.

        Args:
            moved: the coordinator, as far as that is not what `nodes` say.
            stack: closes what is opened here, when this node's part is over.
            signals: ends the listening to signals, which begins here: until the run directory is known, Ctrl-C
                interrupts.

        Returns:
            What the agent needs, and the screen.

        Raises:
            SettingError, LaunchError: if it cannot take part.
            StoppedWaiting: if `stops` came before it does.
        """
        request, nodes, stops = self.request, self.nodes, self.stops
        screen = Screen(sys.stdout, sys.stderr, os.environ)
        thread = ScreenThread(screen)
        endpoint = Endpoint(nodes.host, nodes.port) if moved is None else Endpoint.parse(moved.lease.endpoint)
        # Where the user numbers the nodes, the first one is where they meet, in whatever order they come.
        claims = moved is None and not nodes.node_rank
        listening = endpoint.claim() if claims else None if moved is None else moved.listening
        if listening is None and moved is None and nodes.node_rank == 0:
            raise SettingError(
                f"--node-rank 0, but this machine cannot listen at {endpoint}: --master-addr names the machine that "
                "has --node-rank 0, and no other job may use its port"
            )
        if listening is not None and moved is None and nodes.node_rank is None and (note := endpoint.note()):
            screen.say(note)
        follows = listening is None or moved is not None
        job = prepare_in_time(request, self.machine, self.given, follows=follows)
        if listening is not None:
            stack.enter_context(listening)
            if moved is None:
                stack.enter_context(settle_in_time(job))
        signals.enter_context(stops.listening())

        def stopped() -> bool:
            return stops.times > 0

        if listening is None:
            return join_job(job, endpoint, say=screen.say, stopped=stopped), thread
        lease = None if moved is None else moved.lease
        if moved is not None:
            run_dir = Path(str(request.run_dir)).absolute()
            stack.enter_context(lock_if_free(run_dir))
            job = replace(job, run_dir=run_dir, begins="resume", generation=next_generation(run_dir))
        announce(job, screen)
        return host_job(job, endpoint, listening, stack, lease, say=thread.say, stopped=stopped), thread


def announce(job: Job, screen: Screen) -> None:
    """Tell the user what begins on this node."""
    for note in job.notes:
        screen.say(note)
    where = "" if job.request.nodes is None else " on this node"
    each = "" if job.ranks == 1 else " each"
    # Torch uses all CPUs under `python`; here ranks would slow each other down.
    threads = threads_of_rank(os.environ)
    screen.say(
        f"{plural(job.ranks, 'rank')}{where}, {plural(threads, 'CPU thread')}{each}; logs: {relative_path(job.logs)}"
    )
