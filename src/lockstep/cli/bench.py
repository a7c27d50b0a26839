"""``lockstep bench``: how fast a script is on this machine, with other ranks, strategies, batches and settings."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.command import STRATEGIES, Command, Parser, ScriptParser, option_lines, program_of, say
from lockstep.cli.setting_options import read_set, site_prices
from lockstep.errors import SettingError
from lockstep.launch_contract import EXIT_FAILED, EXIT_OK
from lockstep.settings import Settings, parse

if TYPE_CHECKING:  # they load what a command needs that measures
    from lockstep.launch import Module, Script
    from lockstep.scale import Sweep

_PLACE = Path("bench")


def bench_options() -> Parser:
    """The options of ``lockstep bench``."""
    parser = ScriptParser(
        prog="lockstep bench",
        usage="lockstep bench script.py [options] [-- script options]",
        description="Measure an unchanged script on this machine. Each variant trains for some steps in each of "
        "several rounds; its results are discarded.",
        allow_abbrev=False,
        formatter_class=option_lines(30),
        epilog="The table is printed to stdout. The last line names the directory with the JSON, CSV and SVG files.",
    )
    vary = parser.add_argument_group("what varies; all combinations are measured")
    several: dict[str, Any] = {"nargs": "+", "metavar": "X"}
    vary.add_argument(
        "--ranks", type=int, help="such as 1 2 4 (default: 1, 2, 4 ... up to all GPUs, or all CPUs)", **several
    )
    vary.add_argument("--strategies", default=["ddp"], help=f"of {STRATEGIES} (default: ddp)", **several)
    vary.add_argument(
        "--batch",
        type=int,
        help="samples of a step; with weak scaling, of one rank in a step (default: the script's)",
        **several,
    )
    vary.add_argument("--bucket", type=float, help="MiB of gradients exchanged at once", **several)
    vary.add_argument("--precision", help="fp32, bf16 or fp16", **several)
    vary.add_argument("--workers", type=int, help="loader processes of each rank", **several)
    vary.add_argument(
        "--scaling",
        choices=("strong", "weak"),
        default="strong",
        help="more ranks: same samples per step, or per rank (default: strong)",
    )
    how = parser.add_argument_group("how it is measured")
    how.add_argument("--steps", type=int, default=30, metavar="N", help="steps of each round (default: 30)")
    how.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds (default: 3)")
    how.add_argument(
        "--time-limit", type=float, default=900.0, metavar="SECONDS", help="for one run of a variant (default: 900)"
    )
    how.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of every variant")
    how.add_argument("--rehearse", action="store_true", help="ranks may share a GPU")
    other = parser.add_argument_group("instead of the table, or beside it")
    other.add_argument("--profile", metavar="FILE", help="write a profile for lockstep predict instead")
    other.add_argument(
        "--memory",
        action="store_true",
        help="memory that the script needs, and the batch that fits on each GPU, instead",
    )
    other.add_argument(
        "--find",
        choices=("batch", "workers", "bucket"),
        help="find the fastest value, for the first of --ranks and --strategies, instead",
    )
    other.add_argument("--trace", action="store_true", help="also record a timeline of all ranks of the last variant")
    other.add_argument("--out", metavar="DIR", help="directory of the files (default: a new one under bench/)")
    other.add_argument("--json", action="store_true", help="print JSON instead of the table")
    what = parser.add_argument_group("what to measure")
    what.add_argument("-m", "--module", metavar="NAME", help="a module instead of a script, as in python -m")
    return parser


def _bench(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    # Late, for what it loads is needed only from here on.
    from lockstep.launch import Machine
    from lockstep.scale import Sweep

    if (parsed.script is None) == (parsed.module is None):
        raise SettingError("give a script: lockstep bench train.py --ranks 1 2, or -m NAME for a module")
    for name in ("steps", "rounds"):
        if getattr(parsed, name) < 1:
            raise SettingError(f"--{name} {getattr(parsed, name)}: it must be at least 1")
    if not parsed.time_limit > 0:
        raise SettingError(f"--time-limit {parsed.time_limit:g}: give seconds above 0")
    program = program_of(parsed)
    machine = Machine.detect(os.environ)
    sweep = Sweep(
        ranks=tuple(parsed.ranks or _doublings(machine.gpus or machine.cpus)),
        strategies=tuple(parsed.strategies),
        batches=tuple(parsed.batch or (None,)),
        buckets=tuple(parsed.bucket or (None,)),
        precisions=tuple(parsed.precision or (None,)),
        workers=tuple(parsed.workers or (None,)),
        scaling=parsed.scaling,
        settings=_settings(parsed),
    )
    if parsed.profile is not None:
        return _profile(parsed, program, sweep)
    if parsed.memory:
        return _memory(program, sweep)
    if parsed.find is not None:
        return _find(parsed, program, sweep)
    return _compare(parsed, program, sweep)


def _find(parsed: argparse.Namespace, program: Script | Module, sweep: Sweep) -> int:
    from lockstep.scale import BenchPlan, find, found_report

    found = find(BenchPlan(program, sweep, steps=parsed.steps, time_limit_s=parsed.time_limit), parsed.find, say)
    print(json.dumps(asdict(found), indent=1) if parsed.json else "\n".join(found_report(found)))
    return EXIT_FAILED if found.best is None else EXIT_OK


def _memory(program: Script | Module, sweep: Sweep) -> int:
    from lockstep.scale import FailedRun, look, memory_table, open_catalogue

    seen = look(program, sweep.settings)
    if isinstance(seen, FailedRun):
        raise SettingError(f"{program.name} could not be tried on one rank: {seen.cause}")
    print("\n".join(memory_table(seen, sweep.strategies, sweep.ranks, open_catalogue())))
    return EXIT_OK


def _compare(parsed: argparse.Namespace, program: Script | Module, sweep: Sweep) -> int:
    from lockstep.scale import BenchPlan, bench, draw, table, trace

    plan = BenchPlan(
        program, sweep, steps=parsed.steps, rounds=parsed.rounds, time_limit_s=parsed.time_limit, prices=site_prices()
    )
    out = _directory(parsed, program)
    _check_writable("--out", out)
    result = bench(plan, say)
    out.mkdir(parents=True, exist_ok=True)
    result.write(out / "bench.json")
    print((out / "bench.json").read_text(encoding="utf-8") if parsed.json else table(result))
    try:
        draw(result, out / "bench.svg")
    except SettingError as error:
        say(str(error))
    measured = [row.variant for row in result.rows if row.measured]
    if parsed.trace and measured:
        # Of the last one, which has most ranks where they are listed upwards.
        timeline = trace(plan, measured[-1], out)
        print(f"\n{measured[-1]}:", *timeline.lines, sep="\n", file=sys.stderr if parsed.json else sys.stdout)
        say(f"{timeline.merged}: open it in ui.perfetto.dev or chrome://tracing; {timeline.picture} shows two steps")
    written = [name for name in ("bench.json", "bench.csv", "bench.svg") if (out / name).exists()]
    say(f"{', '.join(written)}: in {out}")
    return EXIT_OK if any(row.measured for row in result.rows) else EXIT_FAILED


def _profile(parsed: argparse.Namespace, program: Script | Module, sweep: Sweep) -> int:
    from lockstep.scale import profile_link, profile_script, write_profile

    ranks, file = max(sweep.ranks), Path(parsed.profile)
    if file.is_dir():
        raise SettingError(f"--profile {file}: this is a directory; give the name of a file")
    _check_writable("--profile", file.parent)
    step = profile_script(program, settings=sweep.settings, steps=parsed.steps)
    link = profile_link(program, ranks, settings=sweep.settings) if ranks > 1 else None
    file.parent.mkdir(parents=True, exist_ok=True)
    write_profile(file, step, link)
    say(f"{parsed.profile}: lockstep predict --profile {parsed.profile} --on ... takes it")
    return EXIT_OK


def _doublings(most: int) -> list[int]:
    """1, 2, 4 ... up to ``most``, and that."""
    found = [1]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found if found[-1] == most else [*found, most]


def _settings(parsed: argparse.Namespace) -> dict[str, str]:
    given = ({"rehearse": "true"} if parsed.rehearse else {}) | read_set(parsed.set)
    Settings(**{name: parse(name, value) for name, value in given.items()})
    for name, values in (("precision", parsed.precision), ("bucket_mb", parsed.bucket)):
        for each in values or ():
            Settings(**{name: each})
    return given


def _check_writable(option: str, directory: Path) -> None:
    """Before anything is measured: whether ``directory`` is one that can be written to, or made."""
    there = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise SettingError(f"{option} {directory}: {there} is no directory that can be written to")


def _directory(parsed: argparse.Namespace, program: Script | Module) -> Path:
    return Path(parsed.out) if parsed.out else _PLACE / f"{program.stem}-{datetime.now():%Y%m%d-%H%M%S}"


#: The command of this file.
COMMANDS = (Command("bench", "measure a script with other ranks, strategies and settings", bench_options, _bench),)
