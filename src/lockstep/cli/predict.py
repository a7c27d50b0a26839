"""``lockstep predict``: what a training would take and cost on other systems, and how good such predictions are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lockstep.cli.command import Command, Parser, ScriptParser
from lockstep.cli.option_formatting import STRATEGIES, option_lines
from lockstep.errors import SettingError


def predict_options() -> Parser:
    """The options of ``lockstep predict``."""
    parser = ScriptParser(
        prog="lockstep predict",
        usage="lockstep predict [script.py | --profile FILE | --table FILE] --on SYSTEM,... [options] "
        "[-- script options]",
        description="Predict how fast a script would train on other GPUs and networks, and what it would cost, from a "
        "profile of it on one device of this machine. Each answer has a 90 % interval and the sources of its numbers.",
        allow_abbrev=False,
        formatter_class=option_lines(30),
        epilog="lockstep.toml has prices of one device for one hour in [prices], GPUs and links of your own in "
        "[predict.gpus.NAME] and [predict.links.NAME].",
    )
    what = parser.add_argument_group("what is predicted")
    what.add_argument(
        "--profile", metavar="FILE", help="a profile instead of a script; lockstep bench --profile FILE writes it"
    )
    what.add_argument(
        "--table", metavar="FILE", help="predict the rows of a CSV file and compare them with its measurements"
    )
    what.add_argument("--anchor", type=int, metavar="N", help="with --table: the measurements of N GPUs are given, too")
    where = parser.add_argument_group("where")
    where.add_argument("--on", metavar="SYSTEM,...", help="such as 4xV100-nvlink,8xA100,16x8xH100-ib")
    where.add_argument(
        "--up-to", type=int, metavar="RANKS", help="also with more nodes of the same kind (default: only those of --on)"
    )
    how = parser.add_argument_group("how it is trained")
    how.add_argument("--strategies", nargs="+", default=["ddp"], metavar="NAME", help=f"of {STRATEGIES} (default: ddp)")
    how.add_argument("--reduction", choices=("exact", "fast"), default="exact", help="default: exact")
    how.add_argument(
        "--bucket", type=float, metavar="MIB", help="MiB of gradients exchanged at once (default: as in training)"
    )
    how.add_argument(
        "--scaling",
        choices=("strong", "weak"),
        default="strong",
        help="more ranks: same samples per step, or per rank (default: strong)",
    )
    how.add_argument(
        "--samples", type=float, metavar="N", help="number of samples of the whole training (default: the script's)"
    )
    choose = parser.add_argument_group("what to choose")
    choose.add_argument(
        "--deadline", metavar="TIME", help="name the cheapest system that ends in time, such as 90m, 12h, 2d"
    )
    choose.add_argument("--budget", type=float, metavar="COST", help="name the fastest system that costs no more")
    choose.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="CHANGE",
        help="compare with a change: bucket=, link=, batch=, strategy=, gpu= or input=",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print a list of rows as JSON instead of the table")
    out.add_argument("--picture", metavar="FILE.svg", help="write a picture, and a CSV file beside it")
    return parser


def _predict(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    given = [name for name in ("script", "profile", "table") if getattr(parsed, name) is not None]
    if len(given) != 1:
        raise SettingError(
            "say what to predict, one of: lockstep predict train.py --on 8xA100, --profile FILE, --table FILE"
        )
    if parsed.anchor is not None and (parsed.table is None or parsed.anchor < 2):
        raise SettingError(f"--anchor {parsed.anchor}: it goes with --table, and is a number of GPUs from 2")
    if parsed.picture is not None and not parsed.picture.endswith(".svg"):
        raise SettingError(f"--picture {parsed.picture}: give a name that ends in .svg")
    # Late, for `lockstep --help` has no use for what it loads.
    from lockstep.cli.predictions import predict_rows, predict_script

    return predict_script(parsed) if parsed.table is None else predict_rows(parsed)


#: The command of this file.
COMMANDS = (Command("predict", "say what a script would take and cost on other systems", predict_options, _predict),)
