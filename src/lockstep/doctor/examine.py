"""`lockstep doctor`: this machine, or all nodes of a job, is tried by ranks that are really started."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.doctor.finding import Finding, Report, note, problem
from lockstep.doctor.host_facts import gather_files, gather_host, private_names
from lockstep.doctor.host_findings import brief
from lockstep.doctor.machine_facts import MachineFacts, NodeFacts
from lockstep.doctor.machine_findings import judge
from lockstep.doctor.script_facts import ScriptFacts, averaged_twice, read_facts
from lockstep.doctor.script_findings import ScriptSeen, Tried, judge_script, slowest_reader, workers_wanted
from lockstep.formatting import plural
from lockstep.launch import (
    Machine,
    Module,
    QuietEnd,
    Script,
    check_program,
    launch_quietly,
    mentions_lockstep,
    own_sources,
)
from lockstep.launch_contract import EXIT_OK
from lockstep.scale import FailedRun, MeasuredRun, measure

_QUICK_BYTES, _BYTES = 1 << 20, 32 << 20
_TIME_LIMIT_S: Final = 300.0
_PROBE: Final = "lockstep.doctor.probe"
_STEPS: Final = 40
_START_S: Final = 120.0  # of two ranks, on a slow file system
_WATCHED: Final = "lockstep.doctor.watched"


@dataclass(frozen=True, slots=True)
class MachineRequest:
    """What is to be tried."""

    ranks: int | None = None  #: of each node; None: one for each GPU, else two
    nodes: int | None = None  #: None: those of the job, else this one
    endpoint: str | None = None  #: where launchers of several nodes meet
    run_dir: str = "runs"  #: whose file system is tried
    quick: bool = False  #: small messages and files


def examine_machine(request: MachineRequest, env: Mapping[str, str], say: Callable[[str], None]) -> Report:
    """Start ranks here, or on all nodes, and judge what they have seen.

    Takes some seconds, and leaves nothing behind. On a node that only takes part in a job of several, the report is of
    that node alone.
    """
    wanted = Path(request.run_dir).absolute()
    directory = next(place for place in (wanted, *wanted.parents) if place.is_dir())
    number = _BYTES if not request.quick else _QUICK_BYTES
    own = NodeFacts(gather_host(env), gather_files(directory, number))
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as elsewhere:
        place = Path(tempfile.mkdtemp(prefix=".lockstep-doctor-", dir=elsewhere if own.files.error else directory))
        try:
            facts = _try(request, env, own, place / "run", number, say)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    return Report(
        subject="machine",
        tested=facts.tested,
        findings=judge(facts),
        variables=own.host.variables,
        private=private_names([node.host for node in facts.nodes]),
    )


def _try(
    request: MachineRequest,
    env: Mapping[str, str],
    own: NodeFacts,
    run_dir: Path,
    number: int,
    say: Callable[[str], None],
) -> MachineFacts:
    ranks = request.ranks or Machine.detect(env).gpus or 2
    options = ["--nproc-per-node", str(ranks), "--run-dir", str(run_dir)]
    if request.nodes == 1:
        options.append("--standalone")
    elif request.nodes is not None:
        options += ["--nnodes", str(request.nodes), "--rdzv-endpoint", request.endpoint or ""]
    say(
        f"starting {plural(ranks, 'rank')}{' on each node' if request.nodes != 1 else ''}, which send to each other ..."
    )
    quiet = {**env, "LOCKSTEP_VIEW": "silent"}
    code, said = launch_quietly([*options, "-m", _PROBE, str(number)], quiet, _TIME_LIMIT_S)
    failure = ""
    if code != EXIT_OK:
        failure = "not done in time" if code is None else QuietEnd.of(run_dir, code, said, _TIME_LIMIT_S).cause
    return MachineFacts.read(run_dir, own, failure)


@dataclass(frozen=True, slots=True)
class ScriptRequest:
    """What is to be tried."""

    program: Script | Module
    ranks: int = 2
    time_s: float = 60.0  #: about so long, its start aside


def examine_script(request: ScriptRequest, say: Callable[[str], None]) -> Report:
    """Train the script on some ranks for a while, and judge what they have seen. What it saves is not kept.

    Raises:
        SettingError: if there is no such script.
    """
    program = request.program
    check_program(program)
    say(f"training {program.name} on {plural(request.ranks, 'rank')}, for at most {request.time_s:.0f} s ...")
    by_run = mentions_lockstep(program)
    facts, failure = _measured(request, {}) if by_run else _watched(request)
    found: list[Finding] = []
    if failure is not None and failure.unmeasured:
        found.append(note("script", what=failure.cause, command=f"--time {10 * request.time_s:.0f}"))
    elif failure is not None:
        again = f"lockstep run --nproc-per-node {request.ranks} {program.name}"
        found.append(problem("script", what=f"on {plural(request.ranks, 'rank')}: {failure.cause}", command=again))
    if facts:
        faults = [] if by_run else [f for file, text in own_sources(program) for f in averaged_twice(file, text)]
        tried = _with_workers(request, facts, say) if by_run else None
        cpus = max(1, Machine.detect(os.environ).cpus // request.ranks)
        found += judge_script(ScriptSeen(facts, faults, cpus, tried))
    host = gather_host(os.environ)
    steps = f", {brief(facts[0].step_s)} a step" if facts and facts[0].step_s else ""
    ranks = f"{plural(request.ranks, 'rank')} on 1 node{steps}"
    tested = ranks if facts else f"{ranks}, which {'did not fail' if failure and failure.unmeasured else 'failed'}"
    return Report(program.name, tested, tuple(found), host.variables, private_names([host]))


def _measured(request: ScriptRequest, settings: dict[str, str]) -> tuple[Sequence[ScriptFacts], FailedRun | None]:
    """Of a script with `Run`, what it has shown and why it failed."""
    run = MeasuredRun(
        request.program,
        request.ranks,
        # What is tried twice is no step as the others.
        {"replay": "false", **settings},
        steps=_STEPS,
        gradients=True,
        memory=True,
        waits=True,
        budget_s=request.time_s * (0.5 if not settings else 0.2),
        time_limit_s=_START_S + 4 * request.time_s,
    )
    outcome = measure(run)
    if isinstance(outcome, FailedRun):
        return (), outcome
    return [ScriptFacts.of(record) for record in outcome.ranks], None


def _watched(request: ScriptRequest) -> tuple[Sequence[ScriptFacts], FailedRun | None]:
    """The same of a script without."""
    program = request.program
    words = [*(["-m"] if isinstance(program, Module) else []), program.name, *program.args]
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as place:
        run_dir = Path(place, "run")
        options = ["--standalone", "--nproc-per-node", str(request.ranks), "--run-dir", str(run_dir)]
        limit_s = _START_S + request.time_s
        env = {**os.environ, "LOCKSTEP_VIEW": "silent"}
        code, said = launch_quietly([*options, "-m", _WATCHED, *words], env, limit_s)
        facts = [each for each in read_facts(run_dir) if each.passes or each.step_s or each.unused]
        if code not in (EXIT_OK, None):
            return facts, FailedRun.of(QuietEnd.of(run_dir, code, said, limit_s))
    # A script that is slow, or has no end, has been watched for long enough.
    return facts, None if facts else FailedRun(
        "no step of an optimizer of torch, and no pass over a DataLoader", False, True
    )


def _with_workers(request: ScriptRequest, facts: Sequence[ScriptFacts], say: Callable[[str], None]) -> Tried | None:
    """Where the loader is slow: the same with as many workers as should do."""
    slowest = slowest_reader(facts)
    if slowest is None:
        return None
    wanted = workers_wanted(slowest)
    say(f"once more with {plural(wanted, 'worker')} ...")
    again, failure = _measured(request, {"workers": str(wanted)})
    return Tried(max((each.step_s for each in again), default=0.0), "" if failure is None else failure.cause)
