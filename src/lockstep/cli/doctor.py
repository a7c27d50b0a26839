"""``lockstep doctor``: what is wrong with this machine, or with a script on several ranks, found by trying."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from lockstep.cli.command import Command, Parser, ScriptParser, option_lines, program_of, say
from lockstep.errors import SettingError


def doctor_options() -> Parser:
    """The options of ``lockstep doctor``."""
    parser = ScriptParser(
        prog="lockstep doctor",
        usage="lockstep doctor [script.py] [options] [-- script options]",
        description="Start ranks and have them send data to each other: is this machine, or are all nodes of this job, "
        "fit for a training? With a script: train it for about a minute on two ranks, and say what it loses and what "
        "it gets wrong there. What it saves by Run or torch.save is not kept.",
        allow_abbrev=False,
        formatter_class=option_lines(30),
        epilog="Exit codes: 0 nothing blocks a training, 2 usage, 3 something does.",
    )
    where = parser.add_argument_group("what is tried")
    where.add_argument("--nproc-per-node", type=int, metavar="N", help="ranks (default: one for each GPU, else 2)")
    where.add_argument(
        "--nodes", type=int, metavar="N", help="machines (default: all of a scheduler's job, else this one)"
    )
    where.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT", help="where they meet; give the same command on each of them"
    )
    where.add_argument("--run-dir", default="runs", metavar="DIR", help="whose file system is tried (default: runs)")
    where.add_argument("--quick", action="store_true", help="small messages and files; of a script, a few steps")
    where.add_argument("--time", type=float, default=60.0, metavar="SECONDS", help="for a script, about (default: 60)")
    where.add_argument("-m", "--module", metavar="NAME", help="a module instead of a script, as in python -m")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print JSON instead of the list")
    out.add_argument(
        "--issue", action="store_true", help="print a block to paste in an issue, without secrets and names"
    )
    return parser


def _doctor(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    if parsed.script is not None and parsed.module is not None:
        raise SettingError("give a script or -m NAME, not both: lockstep doctor train.py")
    for name in ("nproc_per_node", "nodes", "time"):
        value = getattr(parsed, name)
        if value is not None and not value > 0:
            raise SettingError(f"--{name.replace('_', '-')} {value:g}: give a number above 0")
    if (parsed.nodes or 1) > 1 and parsed.rdzv_endpoint is None:
        raise SettingError(
            f"--nodes {parsed.nodes}: say where the machines meet, the same on each: --rdzv-endpoint HOST:PORT. In a "
            "job of a scheduler, leave --nodes out: all its nodes are tried"
        )
    # Late, for what it loads is needed only from here on.
    from lockstep.doctor import MachineRequest, ScriptRequest, examine_machine, examine_script

    if parsed.script is None and parsed.module is None:
        request = MachineRequest(
            parsed.nproc_per_node, parsed.nodes, parsed.rdzv_endpoint, parsed.run_dir, parsed.quick
        )
        report = examine_machine(request, os.environ, say)
    else:
        program = program_of(parsed)
        time_s = parsed.time if not parsed.quick else min(parsed.time, 10.0)
        report = examine_script(ScriptRequest(program, parsed.nproc_per_node or 2, time_s), say)
    print(report.to_json() if parsed.json else report.issue() if parsed.issue else report.text())
    return report.exit_code


#: The command of this file.
COMMANDS = (Command("doctor", "try this machine, or a script on two ranks: what is wrong?", doctor_options, _doctor),)
