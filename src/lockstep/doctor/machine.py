"""`lockstep doctor`: this machine, or all nodes of a job, is tried by ranks that are really started."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.doctor.finding import Report
from lockstep.doctor.host_facts import gather_files, gather_host, private_names
from lockstep.doctor.machine_facts import MachineFacts, NodeFacts
from lockstep.doctor.machine_findings import judge
from lockstep.formatting import plural
from lockstep.launch import Machine, QuietEnd, launch_quietly
from lockstep.launch_contract import EXIT_OK

_QUICK_BYTES, _BYTES = 1 << 20, 32 << 20
_TIME_LIMIT_S: Final = 300.0
_PROBE: Final = "lockstep.doctor.probe"


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
