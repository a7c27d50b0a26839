"""The two ways in: a function for Python and notebooks, and the one that the command line calls."""

from __future__ import annotations

import contextlib
import os
import pickle
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, get_args

from lockstep.errors import LaunchError, SettingError
from lockstep.faults import FaultPlan
from lockstep.launch.agent import Agent, Stops
from lockstep.launch.console import Screen
from lockstep.launch.diagnosis.hang_analysis import HangTimeouts
from lockstep.launch.diagnosis.hang_monitor import HangMonitor
from lockstep.launch.host import Machine
from lockstep.launch.rendezvous.join import Joined, join, preside, single_rank_group
from lockstep.launch.rendezvous.store import Endpoint
from lockstep.launch.request import Function, Nodes, OnHang, Request
from lockstep.launch.run_directory import Job, begun, prepare, settle, shown
from lockstep.launch.schedulers import allocation, job_ends_at
from lockstep.launch.schedulers.remote_start import run_start_commands
from lockstep.launch.schedulers.scheduler import WARNED, Allocation, output_of, run_command, text_of
from lockstep.launch.workers.fork_server import open_nursery
from lockstep.launch.workers.rank_environment import in_common
from lockstep.launch.workers.worker_group import Crew
from lockstep.launch_contract import ENDS_AT, EXIT_FAILED, EXIT_NOT_SAVED, EXIT_OK, EXIT_STOPPED, FAULT_NOTES, FAULTS
from lockstep.report import StatusFile
from lockstep.settings import parse

T = TypeVar("T")


def start(request: Request) -> int:
    """Carry out ``request`` on this machine, showing it on the terminal; returns the exit code for the shell.

    No process of the run is left when it returns. To be called in the main thread if signals are to stop the run.

    Raises:
        SettingError: for what cannot be done, before anything is started.
        WorldError: if this process is itself one of several ranks.
        LaunchError: if ranks could not be started.
    """
    given = allocation(os.environ, text_of)
    if request.nodes is None and request.everywhere and given.has_launcher_per_node:
        request = replace(request, nodes=_as_given(given))
    elif request.nodes is not None and given.nodes:
        request = replace(request, nodes=replace(request.nodes, hosts=tuple(node.name for node in given.nodes)))
    spreads = request.everywhere and given.starts_launchers
    # On a login node nothing tells what the allotted ones have.
    machine = Machine.detect(os.environ) if given.inside else Machine(given.gpus_per_node or 0, given.nodes[0].slots)
    went_on = False
    if request.nodes is not None:
        code = _among_others(request, request.nodes, machine, given)
    else:
        job = prepare(request, machine=machine, env=os.environ, now=datetime.now(), given=given)
        code = _spread_out(job) if spreads else _carry_out(job)[0]
        went_on = job.begins == "resume"
    # A run that went on from a checkpoint and was warned before its first step has lost nothing.
    stopped = code == EXIT_STOPPED or (went_on and code in WARNED)
    # Where each node has its launcher, one of them asks for all.
    if not stopped or not request.requeue or (given.has_launcher_per_node and given.node_rank):
        return code
    again = given.scheduler.requeue(given, code, run_command)
    Screen(sys.stdout, sys.stderr, os.environ).say(again.message)
    return again.code


def _spread_out(job: Job) -> int:
    """Start a launcher on every node, and see them end; the exit code for the shell."""
    given, screen, stops = job.given, Screen(sys.stdout, sys.stderr, os.environ), Stops()
    options = tuple(option for option in job.request.options if option != "--requeue")
    run = replace(job.request, options=options).words(*begun(job))
    # Its own node is the first one, and knows a free port; from elsewhere one can only choose.
    endpoint = f"{_first_host(given)}:{_free_port() if given.inside else given.port()}"
    launcher, here = [sys.executable, "-m", "lockstep", *run], str(Path.cwd())
    commands = given.scheduler.start_commands(given, launcher, endpoint=endpoint, directory=here)
    for note in job.notes:
        screen.say(note)
    screen.say(f"{given}: starting a launcher on each node")
    for command in commands:
        if command.by_user:
            screen.say(f"to be started on {command.host}: cd {shlex.quote(here)} && {command}")
    with stops.listening(), contextlib.closing(screen):
        return run_start_commands(
            [command for command in commands if not command.by_user],
            os.environ,
            lambda: stops.times,
            given.scheduler.stop_signals,
        )


def _as_given(given: Allocation) -> Nodes:
    """All nodes of the job, on each of which a launcher was started without being told of the others."""
    names = tuple(node.name for node in given.nodes)
    return Nodes(len(names), len(names), f"{_first_host(given)}:{given.port()}", run_id=given.job, hosts=names)


def _first_host(given: Allocation) -> str:
    return given.scheduler.node_address(given.nodes[0].name, _resolves, output_of)


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.create_server(("", 0)) as found:
        return int(found.getsockname()[1])


def launch(
    main: Callable[[], T],
    ranks: int | str | None = None,
    *,
    run_dir: str | Path | None = None,
    resume: bool = False,
    fresh: bool = False,
    max_restarts: int = 0,
    settings: Mapping[str, Any] | None = None,
    grace_s: float = 10.0,
    hang_after_s: float | None = None,
    on_hang: OnHang | None = None,
) -> list[T]:
    """Run ``main()`` on ``ranks`` ranks, such as from a notebook; returns what it returned, in the order of the ranks.

    The ranks are copies of this process, so ``main`` may be any function and use any variable; what it changes it
    changes in the copies alone. What it returns must be picklable.

    Args:
        main: called without arguments on each rank.
        ranks: a number, ``"gpu"`` or ``"cpu"``; None: one for each GPU, else one.
        run_dir: where the run leaves its files; None: a new directory under ``runs``.
        resume: go on from the newest whole checkpoint in ``run_dir``.
        fresh: set an earlier run in ``run_dir`` aside.
        max_restarts: how often all ranks are started anew after a failure.
        settings: over those that ``main`` gives to `Run`.
        grace_s: seconds from asking a rank to end until it is killed.
        hang_after_s: seconds without progress after which ranks hang; None: by their own pace.
        on_hang: what is done once a hang is reported: ``"wait"``, ``"abort"`` or ``"restart"``; None: what cannot end
            well is ended, and restarted while the budget lasts.

    Raises:
        SettingError: for what cannot be done.
        LaunchError: if a rank failed; the message names the rank and its error. If the run trained to its end and could
            not save that; the message says why, and the last good step. Also where CUDA is in use already.
        KeyboardInterrupt: if the run was interrupted.
    """
    if not hasattr(os, "fork"):
        raise LaunchError("this system cannot copy processes; put main() in a script and use: lockstep run script.py")
    if on_hang not in (None, *get_args(OnHang)):
        raise SettingError(f"on_hang={on_hang!r}: give one of {', '.join(get_args(OnHang))}, or None")
    for name, value in (settings or {}).items():
        parse(name, value)
    request = Request(
        Function(main),
        nproc_per_node=ranks,
        run_dir=None if run_dir is None else str(run_dir),
        resume=resume,
        fresh=fresh,
        max_restarts=max_restarts,
        settings={name: str(value) for name, value in (settings or {}).items()},
        grace_s=grace_s,
        hang_after_s=hang_after_s,
        on_hang=on_hang,
        way="fork",
    )
    job = prepare(request, machine=Machine.detect(os.environ), env=os.environ, now=datetime.now())
    code, last_words = _carry_out(job)
    if code == 130:
        raise KeyboardInterrupt
    if code != EXIT_OK:
        raise LaunchError(last_words or f"the run ended with exit code {code}; its logs are in {shown(job.logs)}")
    results = [pickle.loads(job.result(rank).read_bytes()) for rank in range(job.ranks)]
    shutil.rmtree(job.result(0).parent)
    return results


def _carry_out(job: Job) -> tuple[int, str]:
    """Carry out ``job`` on this machine; its exit code and the last block that was shown."""
    screen, stops = Screen(sys.stdout, sys.stderr, os.environ), Stops()
    with settle(job, now=datetime.now()), stops.listening():
        _announce(job, screen)
        return _work(single_rank_group(job), screen, stops)


def _among_others(request: Request, nodes: Nodes, machine: Machine, given: Allocation) -> int:
    """Carry out this machine's part of a job that others have a part in; its exit code."""
    screen, stops = Screen(sys.stdout, sys.stderr, os.environ), Stops()
    endpoint = Endpoint(nodes.host, nodes.port)
    nodes = replace(nodes, hosts=tuple(node.name for node in given.nodes))
    with contextlib.ExitStack() as stack:
        stack.enter_context(stops.listening())
        if (listening := endpoint.claim()) is not None:
            stack.enter_context(listening)
            job = prepare(request, machine=machine, env=os.environ, now=datetime.now(), given=given)
            stack.enter_context(settle(job, now=datetime.now()))
            _announce(job, screen)
            joined = preside(job, nodes, endpoint, listening, stack)
        else:
            job = prepare(request, machine=machine, env=os.environ, now=datetime.now(), given=given, follows=True)
            found = join(job, nodes, endpoint, say=screen.say, stopped=lambda: stops.times > 0)
            if found is None:
                return 128 + (stops.first or 0)
            joined = found
        return _work(joined, screen, stops)[0]


def _announce(job: Job, screen: Screen) -> None:
    for note in job.notes:
        screen.say(note)
    here = "" if job.request.nodes is None else " on this node"
    screen.say(f"{job.ranks} rank{'s' * (job.ranks > 1)}{here}; logs: {shown(job.logs)}")


def _work(joined: Joined, screen: Screen, stops: Stops) -> tuple[int, str]:
    job, request = joined.job, joined.job.request
    hang_monitor = HangMonitor(
        HangTimeouts(request.hang_after_s),
        request.on_hang,
        stacks=job.stacks,
        hangs=job.hangs,
        say=screen.say,
        shown=shown,
    )
    with hang_monitor:
        env = {**os.environ, **_ends(request, os.environ), **({FAULTS: request.faults} if request.faults else {})}
        nursery = open_nursery(request.program, job.way, in_common(job, env, hang_monitor.channel))
        with contextlib.closing(nursery), contextlib.closing(screen):
            agent = Agent(joined, Crew(job, nursery, screen, hang_monitor), screen, stops)
            code = _judged(job, screen, agent.run())
            if code not in (EXIT_OK, EXIT_STOPPED) and (status := StatusFile.read(job.status)) is not None:
                StatusFile(job.status).write(replace(status, state="unsaved" if code == EXIT_NOT_SAVED else "failed"))
            return code, agent.last_words


def _ends(request: Request, env: Mapping[str, str]) -> dict[str, str]:
    """The variable that tells ranks when their job ends."""
    at_s = request.ends_at_s
    if at_s is None and not env.get(ENDS_AT):
        at_s = job_ends_at(env, output_of)
    return {} if at_s is None else {ENDS_AT: f"{at_s:.0f}"}


def _judged(job: Job, screen: Screen, code: int) -> int:
    """``code``; but a run in which a fault that was asked for never happened has failed."""
    plan, notes = FaultPlan.parse(job.request.faults), job.run_dir / FAULT_NOTES
    plan.clean(notes)
    missed = plan.missed(notes)
    for fault in missed:
        screen.say(f"never happened: {fault}")
    return EXIT_FAILED if missed else code
