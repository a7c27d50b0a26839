"""``lockstep predict``: what a training would take and cost on other systems, and how good such predictions are."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.command import STRATEGIES, Command, Parser, ScriptParser, option_lines, say
from lockstep.cli.setting_options import site_prices, site_table
from lockstep.errors import SettingError
from lockstep.launch_contract import EXIT_FAILED, EXIT_OK
from lockstep.records import read_bytes

if TYPE_CHECKING:  # loads what the other commands do without
    import lockstep.scale as scale

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


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
    return _predict_script(parsed) if parsed.table is None else _predict_rows(parsed)


def _predict_rows(parsed: argparse.Namespace) -> int:
    """Predict the rows of ``--table`` from one of each group, and print them beside what was measured."""
    # Late, for `lockstep --help` has no use for what it loads.
    import lockstep.scale as scale

    try:
        rows, unread = scale.read_rows(read_bytes(parsed.table).decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise SettingError(f"--table {parsed.table}: {error}") from None
    catalogue = scale.open_catalogue(site_table("predict"))
    found, notes = scale.predict_table(rows, scale.shipped_loss(), catalogue, parsed.anchor)
    by_source, _ = scale.predict_table(rows, scale.shipped_loss(), catalogue, parsed.anchor, "source")
    summary = scale.rows_summary(found)
    if by_source != found:
        summary += ["", "and where all of a row's source is left out:", *scale.rows_summary(by_source)]
    if parsed.json:
        pairs = zip(found, by_source, strict=True)
        print(json.dumps([{**one.as_dict(), "by_source": other.interval()} for one, other in pairs], indent=1))
        say("\n".join(summary))
    else:
        print("\n".join([*scale.rows_table(found), "", *summary]))
    for note in [*unread, *notes]:
        say(note)
    if not found:
        say(f"{parsed.table}: nothing to predict; it needs rows of one group with different gpus_total")
    if parsed.picture is not None and found:
        _draw(lambda path: scale.draw_table(found, path), parsed.picture)
    return EXIT_OK if found else EXIT_FAILED


def _predict_script(parsed: argparse.Namespace) -> int:
    """Predict a script, measured here or before, on the systems of ``--on``, and print what it takes and costs."""
    # Late, for `lockstep --help` has no use for what it loads.
    import lockstep.scale as scale

    deadline_s = None if parsed.deadline is None else _seconds(parsed.deadline)
    request = _request(parsed)
    changes = {text: scale.what_if(request, text) for text in parsed.what_if}
    found, notes = scale.predict(request)
    if not found:
        raise SettingError(f"nothing could be predicted: {'; '.join(notes)}")
    if deadline_s is not None and all(one.total_s is None for one in found):
        raise SettingError("--deadline: how long the script trains is not known; give --samples, of the whole training")
    if parsed.json:
        rows = [{"what_if": None, **one.as_dict()} for one in found]
        rows += [
            {"what_if": text, **one.as_dict()} for text, changed in changes.items() for one in scale.predict(changed)[0]
        ]
        print(json.dumps(rows, indent=1))
    else:
        lines = [*scale.estimates_table(found, request.prices.currency), ""]
        for one in scale.largest(found):
            lines += scale.why_not(one) if one.ranks > 1 else []
        for text, changed in changes.items():
            lines += ["", *scale.compared(scale.side_by_side(request, changed), text)]
        if deadline_s is not None:
            cheapest = scale.cheapest_within(found, deadline_s)
            lines += ["", scale.choice(f"cheapest within {parsed.deadline}", cheapest)]
        if parsed.budget is not None:
            fastest = scale.fastest_within(found, parsed.budget)
            lines += ["", scale.choice(f"fastest within {parsed.budget:g}", fastest)]
        print("\n".join([*lines, "", *scale.basis(found)]))
    for note in notes:
        say(note)
    if parsed.picture is not None:
        _draw(lambda path: scale.draw_estimates(found, path), parsed.picture)
    return EXIT_OK


def _request(parsed: argparse.Namespace) -> scale.PredictionRequest:
    # Late, for `lockstep --help` has no use for what it loads.
    import lockstep.scale as scale

    if parsed.on is None:
        raise SettingError("say where: --on 4xV100-nvlink,8xA100,16x8xH100-ib")
    if parsed.up_to is not None and parsed.up_to < 1:
        raise SettingError(f"--up-to {parsed.up_to}: give a number of ranks from 1")
    for name in ("samples", "budget"):
        value = getattr(parsed, name)
        if value is not None and not 0 < value < math.inf:
            raise SettingError(f"--{name} {value:g}: give a number above 0")
    catalogue, prices = scale.open_catalogue(site_table("predict")), site_prices()
    systems = tuple(scale.parse_system(word, catalogue) for word in parsed.on.split(",") if word.strip())
    if not systems:
        raise SettingError(f"--on {parsed.on!r}: say where, such as 4xV100-nvlink,8xA100,16x8xH100-ib")
    on_cpu = all(system.gpu.name == "cpu" for system in systems)
    strategies = tuple(
        scale.SimulatedStrategy.parse(
            spec, reduction=parsed.reduction, bucket_mb=parsed.bucket, device="cpu" if on_cpu else "cuda"
        )
        for spec in parsed.strategies
    )
    profile, link = _profile(parsed)
    return scale.PredictionRequest(
        profile=profile,
        systems=systems,
        strategies=strategies,
        catalogue=catalogue,
        weak=parsed.scaling == "weak",
        up_to=parsed.up_to,
        samples=parsed.samples,
        prices=prices,
        loss=scale.shipped_loss(),
        link=link,
    )


def _profile(parsed: argparse.Namespace) -> tuple[scale.StepProfile, scale.LinkProfile | None]:
    # Late, for `lockstep --help` has no use for what it loads.
    import lockstep.scale as scale
    from lockstep.launch import Script

    if parsed.profile is not None:
        try:
            return scale.read_profile(Path(parsed.profile))
        except OSError as error:
            raise SettingError(f"--profile {parsed.profile}: {error}") from None
    say(f"measuring {parsed.script} on one device of this machine")
    return scale.profile_script(Script(parsed.script, tuple(parsed.args))), None


def _draw(draw: Callable[[Path], None], path: str) -> None:
    try:
        draw(Path(path))
        say(f"{path}, and a CSV file beside it")
    except SettingError as error:  # the numbers are said already
        say(str(error))
    except OSError as error:
        raise SettingError(f"--picture {path}: {error}") from None


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or (match.group(2) or "s") not in _UNITS or float(match.group(1)) <= 0:
        raise SettingError(f"--deadline {text}: give a time such as 90m, 12h or 2d")
    return float(match.group(1)) * _UNITS[match.group(2) or "s"]


#: The command of this file.
COMMANDS = (Command("predict", "say what a script would take and cost on other systems", predict_options, _predict),)
