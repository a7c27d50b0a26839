"""``lockstep verify``: does a script give the same bits however it is run?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lockstep.cli.command import Command, Parser, ScriptParser, option_lines, program_of, say
from lockstep.cli.setting_options import read_set
from lockstep.errors import SettingError
from lockstep.formatting import plural
from lockstep.launch_contract import EXIT_FAILED, EXIT_OK
from lockstep.records import read_object
from lockstep.settings import Settings, parse
from lockstep.strategy_kinds import read_strategy

if TYPE_CHECKING:  # they load what a command needs that starts ranks
    from lockstep.launch import Module, Script

FILE: Final = "verify.json"
#: What ways vary, beside running the script again; as `lockstep.verify.way.Varies` names it.
_VARIED: Final = ("ranks", "workers", "surroundings", "resume", "checkpoint", "evaluation", "micro-batch", "strategy")


def verify_options() -> Parser:
    """The options of ``lockstep verify``."""
    parser = ScriptParser(
        prog="lockstep verify",
        usage="lockstep verify script.py [options] [-- script options]",
        description="Run a few steps of an unchanged script in several ways, and compare all that it does, bit for "
        "bit: once more, on 1, 2 and 3 ranks, with other loader processes, killed and resumed, with another clock, "
        "host name, directory and hash seed. What differs is named, with the line that is likely to blame.",
        allow_abbrev=False,
        formatter_class=option_lines(30),
        epilog="Exit codes: 0 all equal, 1 something differs or the script fails as it is, 2 usage.",
    )
    several: dict[str, Any] = {"nargs": "+", "metavar": "X"}
    parser.add_argument("--time", type=float, default=120.0, metavar="SECONDS", help="for all of it (default: 120)")
    parser.add_argument("--strategies", default=[], help="that must give the same, such as ddp zero fsdp", **several)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the script's run"
    )
    parser.add_argument("--out", default=FILE, metavar="FILE", help=f"what was found (default: {FILE})")
    parser.add_argument(
        "--only", default=[], choices=_VARIED, help=f"what is varied: {', '.join(_VARIED)} (default: all)", **several
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("-m", "--module", metavar="NAME", help="a module instead of a script, as in python -m")
    return parser


def _verify(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    # Late, for what it loads is needed only from here on.
    from lockstep.verify import VerifyPlan, report, verify

    if (parsed.script is None) == (parsed.module is None):
        raise SettingError("give a script: lockstep verify train.py, or -m NAME for a module")
    if not parsed.time > 0:
        raise SettingError(f"--time {parsed.time:g}: give seconds above 0")
    out = Path(parsed.out)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise SettingError(f"--out {parsed.out}: give the name of a file in a directory that is there")
    settings = read_set(parsed.set)
    Settings(**{name: parse(name, value) for name, value in settings.items()})
    for strategy in parsed.strategies:
        read_strategy(strategy)
    program = program_of(parsed)
    plan = VerifyPlan(program, tuple(parsed.strategies), settings, tuple(parsed.only), parsed.time)
    result = verify(plan, say)
    result.write(out)
    print(result.to_json() if parsed.json else "\n".join(report(result)))
    return EXIT_OK if result.is_equal else EXIT_FAILED


def said_of(program: Script | Module) -> str:
    """What `verify.json` in the working directory says of ``program``, in a line; "" if nothing.

    Whatever is in that file, it ends nothing.
    """
    # Late, for what it loads is needed where there is such a file only.
    from lockstep.launch import sources_hash

    try:
        result = read_object(FILE)
    except (OSError, ValueError):
        return ""
    ways = result.get("ways")
    if result.get("sha256") != sources_hash(program) or not isinstance(ways, list):
        return ""
    counted = [way.get("status") for way in ways if isinstance(way, dict)]
    if result.get("equal") is True:
        return f"verified: equal in {plural(counted.count('equal'), 'way')} ({FILE})"
    return f"{FILE}: this script is not the same in {plural(counted.count('differs'), 'way')} to run it"


#: The command of this file.
COMMANDS = (
    Command("verify", "is a script the same however it is run? what differs, and where", verify_options, _verify),
)
