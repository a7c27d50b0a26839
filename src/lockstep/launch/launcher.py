"""Starts a run and sees it end: `start` for the command line, `launch` for Python and notebooks.

start ─┬─ one machine ─────────────────────►  _run_here ─────────────┬─►  _run_agent: the fork server, its ranks,
       ├─ several, a launcher on each ─────►  _run_among_others ─────┘    and the agent that looks after them
       └─ several, this one starts others ─►  _start_everywhere
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, get_args

from lockstep.errors import LaunchError, SettingError
from lockstep.faults import Fault, FaultPlan
from lockstep.formatting import plural, relative_path
from lockstep.launch.agent import AfterFailure, Agent, Stops
from lockstep.launch.host.machine import Machine, threads_of_rank
from lockstep.launch.host.timed_calls import FileThread, ScreenThread, StoppedWaiting, call_in_time
from lockstep.launch.job.request import Function, Nodes, OnHang, Request
from lockstep.launch.rendezvous.endpoint import Endpoint
from lockstep.launch.rendezvous.job_contract import SECRET
from lockstep.launch.rendezvous.join import Joined, host_job, join_alone, join_job
from lockstep.launch.rendezvous.lease import Lease, LeaseFiles
from lockstep.launch.rendezvous.takeover import NewCoordinator, living_holder
from lockstep.launch.run_dir.owned_directory import emergency_memory
from lockstep.launch.run_dir.run_directory import (
    Job,
    begin_options,
    lock_if_free,
    next_generation,
    note_refused,
    prepare_in_time,
    settle_in_time,
)
from lockstep.launch.schedulers import allocation, job_ends_at
from lockstep.launch.schedulers.scheduler import WARNED, Allocation, output_of, run_command, run_start_commands, text_of
from lockstep.launch.terminal.attached_terminal import AttachedTerminal, has_terminal
from lockstep.launch.terminal.console import Screen, say
from lockstep.launch.timeouts import NodeTimeouts
from lockstep.launch.workers.fork_server_client import check_can_be_copied, open_fork_server
from lockstep.launch.workers.rank_environment import common_environment
from lockstep.launch.workers.rank_messages import RankChannel
from lockstep.launch.workers.worker_group import WorkerGroup
from lockstep.launch_contract import (
    EMERGENCY,
    ENDS_AT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_SAVED,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USAGE,
    FAULT_NOTES,
    FAULTS,
    LAUNCHER,
    RUN_FILE,
)
from lockstep.report import State, StatusFile
from lockstep.settings import parse
from lockstep.strategy_kinds import read_strategy

T = TypeVar("T")


def start(request: Request) -> int:
    """Carry out ``request`` on this machine, showing it on the terminal; returns the exit code for the shell.

    No process of the run is left when it returns. Call it in the main thread if signals are to stop the run.

    Raises:
        SettingError: if the run cannot be started as asked for; nothing has been started then.
        WorldError: if this process is itself one of several ranks.
        LaunchError: if ranks could not be started.
    """
    given = allocation(os.environ, text_of)
    request = _on_allocated_nodes(request, given)
    if request.attach is not None and (request.nodes or (request.everywhere and given.starts_launchers)):
        raise SettingError(
            f"--attach {request.attach}: a terminal is for the ranks of its own machine; use --standalone"
        )
    # On a login node nothing says what the allocated nodes have.
    machine = Machine.detect(os.environ) if given.inside else Machine(given.gpus_per_node or 0, given.nodes[0].slots)
    resumed = goes_on = False
    try:
        if request.nodes is not None:
            code, goes_on = _run_among_others(request, request.nodes, machine, given)
        else:
            job = prepare_in_time(request, machine, given)
            _check_attach(request)
            code = _start_everywhere(job) if request.everywhere and given.starts_launchers else _run_here(job)[0]
            resumed = job.begins == "resume"
    except KeyboardInterrupt:  # before signals are listened to
        say("stopped by Ctrl-C, before any rank was started")
        return EXIT_INTERRUPTED
    # A run that went on from a checkpoint and was warned before its first step has lost nothing.
    stopped = code == EXIT_STOPPED or (resumed and code in WARNED)
    # Where each node has its launcher, one of them asks for all; a node that the others go on without asks for none.
    if not stopped or goes_on or not request.requeue or (given.has_launcher_per_node and given.node_rank):
        return code
    again = given.scheduler.requeue(given, code, run_command)
    say(again.message)
    return again.code


def launch(
    main: Callable[..., T],
    ranks: int | str | None = None,
    *,
    args: Sequence[object] = (),
    run_dir: str | Path | None = None,
    resume: bool = False,
    fresh: bool = False,
    max_restarts: int = 0,
    settings: Mapping[str, object] | None = None,
    grace_s: float = 10.0,
    hang_after_s: float | None = None,
    on_hang: OnHang | None = None,
) -> list[T]:
    """Run ``main(*args)`` on ``ranks`` ranks, such as from a notebook; returns what it returned, in the ranks' order.

    The ranks are copies of this process, so ``main`` may be any function and use any variable; what it changes
    changes in the copies only. What it returns must be picklable.

    Args:
        main: called on each rank.
        ranks: a number, ``"gpu"`` or ``"cpu"``; None: one for each GPU, else one.
        args: what ``main`` is called with, the same on each rank.
        run_dir: where the run writes its files; None: a new directory under ``runs``.
        resume: go on from the newest complete checkpoint in ``run_dir``.
        fresh: move an earlier run in ``run_dir`` aside.
        max_restarts: how often all ranks are restarted after a failure.
        settings: for `Run`, where they replace those that ``main`` gives.
        grace_s: seconds from asking a rank to end until it is killed.
        hang_after_s: seconds without progress after which ranks hang; None: measured on the run.
        on_hang: what is done once a hang is reported: ``"wait"``, ``"abort"`` or ``"restart"``; None: a
            generation that cannot go on is ended, and restarted while restarts are left.

    In a notebook the progress is one output of the cell, which follows the run. Interrupting the kernel lets the ranks
    save and end, twice: end without saving. No process of the run is left when this returns or raises.

    Raises:
        SettingError: if the run cannot be started as asked for.
        LaunchError: if a rank failed; the message names the rank and its error. If the run was trained to its end and
            could not save that; the message says why, and the last good step. If the run was stopped otherwise than by
            the user, such as for the end of its job. If CUDA is in use already: nothing is written then.
        KeyboardInterrupt: if the run was interrupted, with a checkpoint or without one.
    """
    if not hasattr(os, "fork"):
        raise LaunchError("this system cannot copy processes; put main() in a script and use: lockstep run script.py")
    check_can_be_copied()  # before anything is written
    if on_hang not in (None, *get_args(OnHang)):
        raise SettingError(f"on_hang={on_hang!r}: give one of {', '.join(get_args(OnHang))}, or None")
    for name, value in (settings or {}).items():
        parse(name, value)
        if name == "strategy":
            read_strategy(str(value))
    request = Request(
        Function(main, tuple(args)),
        nproc_per_node=ranks,
        run_dir=None if run_dir is None else str(run_dir),
        resume=resume,
        fresh=fresh,
        max_restarts=max_restarts,
        settings={name: str(value) for name, value in (settings or {}).items()},
        grace_s=grace_s,
        hang_after_s=hang_after_s,
        on_hang=on_hang,
        start_method="fork",
    )
    stops = Stops()
    code, failure = _run_here(job := prepare_in_time(request, Machine.detect(os.environ)), stops=stops)
    if code == EXIT_INTERRUPTED or (code == EXIT_STOPPED and stops.first == signal.SIGINT):
        raise KeyboardInterrupt
    if code == EXIT_STOPPED:
        raise LaunchError(f"the run was stopped with a complete checkpoint; to go on: {job.to_resume}")
    if code != EXIT_OK:
        raise LaunchError(failure or f"the run ended with exit code {code}; its logs are in {relative_path(job.logs)}")
    paths = [job.result(rank) for rank in range(job.ranks)]
    # Fewer, where a device was left out.
    results = [pickle.loads(path.read_bytes()) for path in paths[:1] + [path for path in paths[1:] if path.exists()]]
    shutil.rmtree(job.result(0).parent)
    return results


def watch(request: Request, after_failure: AfterFailure) -> tuple[int, str]:
    """As `start`, for one of several runs on this machine that each have a process of their own.

    What is said goes to this process' standard output and error.

    Returns:
        The exit code, and the failure that was shown last, "" if there was none.

    Args:
        request: what to run.
        after_failure: see `lockstep.launch.agent.Agent`.

    Raises:
        SettingError, LaunchError: as `start` does.
    """
    # Several machines may each have a process that starts such runs; that it is one of them is nothing to the run.
    env = {**os.environ, LAUNCHER: "none"}
    return _run_here(prepare_in_time(request, Machine.detect(os.environ), env=env), after_failure)


def _on_allocated_nodes(request: Request, given: Allocation) -> Request:
    """``request`` with the nodes of the allocation, where this launcher is one of several."""
    hosts = tuple(node.name for node in given.nodes)
    if request.nodes is not None:
        return replace(request, nodes=replace(request.nodes, hosts=hosts))
    if request.everywhere and given.has_launcher_per_node:
        # A launcher was started on each node without being told of the others.
        endpoint = f"{_first_host(given)}:{given.port()}"
        nodes = Nodes.of(str(len(hosts)), endpoint, given.job, request.among_nodes)
        return replace(request, nodes=nodes and replace(nodes, hosts=hosts))
    return request


def _start_everywhere(job: Job) -> int:
    """Start a launcher on every node, and wait until all have ended; returns the exit code for the shell."""
    given, screen, stops = job.given, Screen(sys.stdout, sys.stderr, os.environ), Stops()
    options = tuple(option for option in job.request.options if option != "--requeue")
    run = replace(job.request, options=options).command_args(*begin_options(job))
    # On the first node of the job a free port can be found; from another host one can only be chosen.
    endpoint = f"{_first_host(given)}:{_free_port() if given.inside else given.port()}"
    launcher, directory = [sys.executable, "-m", "lockstep", *run], str(Path.cwd())
    commands = given.scheduler.start_commands(given, launcher, endpoint=endpoint, directory=directory)
    for note in job.notes:
        screen.say(note)
    screen.say(f"{given}: starting a launcher on each node")
    for command in commands:
        if command.by_user:
            screen.say(f"to be started on {command.host}: cd {shlex.quote(directory)} && {command}")
    env = dict(os.environ)
    if not any(command.by_user for command in commands):
        # Launchers that the scheduler starts inherit it: they need no private directory in common.
        env.setdefault(SECRET, os.urandom(32).hex())
    with stops.listening(), contextlib.closing(screen):
        return run_start_commands(
            [command for command in commands if not command.by_user],
            env,
            lambda: stops.times,
            given.scheduler.stop_signals,
        )


def _run_here(
    job: Job, after_failure: AfterFailure = lambda exits, generation: True, stops: Stops | None = None
) -> tuple[int, str]:
    """Carry out ``job`` on this machine; returns its exit code and the failure that was shown last."""
    screen, stops = Screen(sys.stdout, sys.stderr, os.environ), stops or Stops()
    joined = join_alone(job)
    with settle_in_time(job), stops.listening(), _room_for_emergencies(joined) as room:
        _announce(job, screen)
        ended = _run_agent(joined, ScreenThread(screen), stops, room, after_failure)
        return ended.code, ended.failure


def _run_among_others(request: Request, nodes: Nodes, machine: Machine, given: Allocation) -> tuple[int, bool]:
    """Carry out this machine's part of a job on several machines; its exit code, and whether others go on with it."""
    stops, moved = Stops(), _running_elsewhere(request, nodes)
    part = _NodePart(request, nodes, machine, given, stops)
    room: Mapping[str, str] | None = None
    with contextlib.ExitStack() as job:
        while True:
            with contextlib.ExitStack() as stack:
                try:
                    joined, screen = part.take(moved, stack, job)
                except StoppedWaiting:
                    say("stopped before any rank was started")
                    return 128 + (stops.first or 0), False
                if room is None:
                    # What ranks leave is for the generations of another coordinator, too.
                    room = job.enter_context(_room_for_emergencies(joined))
                ended = _run_agent(joined, screen, stops, room)
            if ended.moved is None:
                return ended.code, ended.job_goes_on
            moved = ended.moved


def _running_elsewhere(request: Request, nodes: Nodes) -> NewCoordinator | None:
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
class _NodePart:
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
        _announce(job, screen)
        return host_job(job, endpoint, listening, stack, lease, say=thread.say, stopped=stopped), thread


def _announce(job: Job, screen: Screen) -> None:
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


@dataclass(frozen=True, slots=True)
class _Ended:
    """How this node's part of a job ended."""

    code: int  #: for the shell
    failure: str  #: that was shown last, "" if there was none
    job_goes_on: bool  #: on other nodes
    moved: NewCoordinator | None  #: this node is to take part in the job again, with this coordinator


def _run_agent(
    joined: Joined,
    screen: ScreenThread,
    stops: Stops,
    room: Mapping[str, str],
    after_failure: AfterFailure = lambda exits, generation: True,
) -> _Ended:
    """Start the fork server and carry out this node's part of the job."""
    job, request = joined.job, joined.job.request
    files = FileThread(screen.say, relative_path)
    channel = RankChannel(screen.say)
    env = {**os.environ, **_end_of_job(request, os.environ), **({FAULTS: request.faults} if request.faults else {})}
    with contextlib.ExitStack() as stack:
        # The last words are those of whatever is closed before.
        stack.callback(screen.finish, lambda: stops.times)
        common = {**common_environment(job, env, channel.address), **room}
        stack.enter_context(contextlib.closing(files))
        stack.enter_context(channel)
        terminal = _terminal_of(job, files)
        if terminal is not None:
            stack.enter_context(contextlib.closing(terminal))
        workers = WorkerGroup(
            job,
            lambda: open_fork_server(request.program, job.start_method, common),
            screen,
            channel,
            files,
            terminal,
            Path(room[EMERGENCY]) if EMERGENCY in room else None,
        )
        stack.enter_context(contextlib.closing(workers))
        stack.callback(screen.close)
        agent = Agent(joined, workers, screen, stops, files, after_failure)
        code = _with_missed_faults(job, screen, files, agent.run())
        if code == EXIT_USAGE and request.nodes is None:
            files.ask(lambda: note_refused(job), None, of=job.run_dir / RUN_FILE)
        if code not in (EXIT_OK, EXIT_STOPPED):
            state: State = "unsaved" if code == EXIT_NOT_SAVED else "failed"
            files.ask(lambda: _note_state(job.status, state), None, of=job.status)
        return _Ended(code, agent.last_failure, agent.released, agent.moved)


def _note_state(path: Path, state: State) -> None:
    if (status := StatusFile.read(path)) is not None:
        StatusFile(path).write(replace(status, state=state))


@contextlib.contextmanager
def _room_for_emergencies(joined: Joined) -> Iterator[dict[str, str]]:
    """The variable that tells ranks where they leave what they hold, where another generation may come."""
    if not (joined.limits.max_restarts or joined.limits.max_changes):
        yield {}
        return
    with emergency_memory(joined.job.run_dir) as memory:
        yield {EMERGENCY: str(memory)}


def _check_attach(request: Request) -> None:
    """Check that there is a terminal to attach a rank to, where that is asked for.

    Raises:
        SettingError: if there is none, with what to do instead.
    """
    if request.attach is not None and not has_terminal(sys.stdin, sys.stdout):
        raise SettingError(
            f"--attach {request.attach}: there is no terminal here, since input or output is a file or a pipe; "
            "start it in a terminal, or leave --attach out"
        )


def _terminal_of(job: Job, files: FileThread) -> AttachedTerminal | None:
    """The terminal of the rank that is to have it; None if none has."""
    rank = job.request.attach
    only = job.ranks == 1 and job.request.nodes is None and not isinstance(job.request.program, Function)
    if rank is None and only and has_terminal(sys.stdin, sys.stdout, sys.stderr):
        rank = 0
    return None if rank is None else AttachedTerminal(rank, sys.stdin.fileno(), files)


def _end_of_job(request: Request, env: Mapping[str, str]) -> dict[str, str]:
    """The variable that tells ranks when their job ends."""
    at_s = request.ends_at_s
    if at_s is None and not env.get(ENDS_AT):
        at_s = job_ends_at(env, output_of)
    return {} if at_s is None else {ENDS_AT: f"{at_s:.0f}"}


def _with_missed_faults(job: Job, screen: ScreenThread, files: FileThread, code: int) -> int:
    """``code``; or that of a failure, if a fault that was to be injected never happened."""
    if not job.request.faults:
        return code
    plan, notes = FaultPlan.parse(job.request.faults), job.run_dir / FAULT_NOTES
    files.ask(lambda: plan.clean(notes), None, of=notes)
    missed = files.ask(lambda: list(plan.missed(notes)), list[Fault](), of=notes)
    for fault in missed:
        screen.say(f"never happened: {fault}")
    return EXIT_FAILED if missed else code


def _first_host(given: Allocation) -> str:
    return given.scheduler.node_address(given.nodes[0].name, _resolves, output_of)


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])
