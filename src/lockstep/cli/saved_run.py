"""``lockstep export`` and ``lockstep checkpoints``: what a run has saved."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from lockstep.cli.command import Command, Parser, option_lines, say
from lockstep.errors import CheckpointError, SettingError
from lockstep.formatting import duration, harmless, size
from lockstep.launch_contract import EXIT_FAILED, EXIT_OK

_RUN_HELP = "a run directory, such as runs/NAME; its directory of checkpoints; or one checkpoint"


def _export_options() -> Parser:
    parser = Parser(
        prog="lockstep export",
        usage="lockstep export [options] RUN OUT",
        description="Write a trained model to a file that other programs load, from a checkpoint of any strategy. No "
        "rank is started.",
        allow_abbrev=False,
        formatter_class=option_lines(32),
    )
    parser.add_argument(
        "--step", default="newest", metavar="N|best|newest", help="which checkpoint (default: the newest)"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="where a run has several: number, class, or the name under which it is kept"
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=_RUN_HELP)
    parser.add_argument(
        "out", nargs="?", metavar="OUT", help="model.safetensors, model.pt, or a directory for from_pretrained"
    )
    return parser


def _export(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    # Late, for what it loads is needed only from here on.
    from lockstep.saved_run import export

    if parsed.run is None or parsed.out is None:
        raise SettingError("say of which run, and where to: lockstep export runs/NAME model.safetensors")
    try:
        done = export(parsed.run, parsed.out, step=parsed.step, model=parsed.model)
    except (CheckpointError, OSError) as error:
        return _failed("export", error)
    config = "" if not done.out.is_dir() else ", with its config" if done.with_config else ", without a config"
    print(
        f"{done.out}: model {harmless(done.model)} after step {done.step}, {done.tensors} tensors, "
        f"{size(done.size_bytes)}{config}",
        file=sys.stderr,
    )
    return EXIT_OK


def _list_options() -> Parser:
    parser = _checkpoints_parser("list", "[--json] RUN", "Show the checkpoints of a run, newest first.")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    return parser


def _list(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    # Late, as above.
    from lockstep.saved_run import rows

    found = rows(_run_of(parsed, "list"))
    if parsed.json:
        print(json.dumps([row.as_dict() for row in found]))
        return EXIT_OK
    table = [("step", "epoch", "size", "age", "written by", "metrics")]
    for row in found:
        step = str(row.step) + (f" ({row.name})" if "." in row.name else "")
        if row.damaged:
            table.append((step, "", "", duration(row.age_s), "", f"DAMAGED: {row.damaged}"))
            continue
        metrics = "  ".join(f"{name} {_shown(value)}" for name, value in row.metrics.items())
        writer = row.strategy + (f" on {row.ranks}" if row.ranks else "")
        cells = ("" if row.epoch is None else str(row.epoch), size(row.size_bytes), duration(row.age_s), writer)
        table.append((step + (" best" if row.best else ""), *cells, metrics))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print(harmless("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()))
    return EXIT_OK


def _verify_options() -> Parser:
    parser = _checkpoints_parser(
        "verify", "[--step N] RUN", "Read the checkpoints of a run and compare them with their checksums. Exit code 1"
        " if one is damaged."
    )  # fmt: skip
    parser.add_argument("--step", type=int, metavar="N", help="only this one (default: all)")
    return parser


def _verify(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    # Late, as above.
    from lockstep.saved_run import check

    checked = check(_run_of(parsed, "verify"), parsed.step)
    for one, fault in checked:
        print(harmless(f"{one.path.name}  {f'DAMAGED: {fault}' if fault else 'whole'}"))
    return EXIT_FAILED if any(fault for _, fault in checked) else EXIT_OK


def _prune_options() -> Parser:
    parser = _checkpoints_parser(
        "prune", "--keep N [--yes] RUN", "Remove older checkpoints of a run that is over. The best one stays, too, and "
        "what is damaged never pushes out what is whole."
    )  # fmt: skip
    parser.add_argument("--keep", type=int, metavar="N", help="how many stay, the newest whole ones")
    parser.add_argument("--yes", action="store_true", help="remove them (default: only say which)")
    return parser


def _prune(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    # Late, as above.
    from lockstep.saved_run import prune

    run = _run_of(parsed, "prune")
    if parsed.keep is None:
        raise SettingError("say how many stay: --keep N")
    try:
        gone = prune(run, parsed.keep, say, really=parsed.yes)
    except OSError as error:
        return _failed("checkpoints prune", error)
    for one in gone:
        print(one.path)
    what = "removed" if parsed.yes else "to be removed: say --yes as well"
    print(f"{len(gone)} {what}" if gone else "nothing to remove", file=sys.stderr)
    return EXIT_OK


def _checkpoints_parser(name: str, usage: str, does: str) -> Parser:
    parser = Parser(
        prog=f"lockstep checkpoints {name}",
        usage=f"lockstep checkpoints {name} {usage}",
        description=f"{does} The short form of the command is: lockstep ckpt {name}",
        allow_abbrev=False,
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=_RUN_HELP)
    return parser


def _run_of(parsed: argparse.Namespace, name: str) -> str:
    if parsed.run is None:
        raise SettingError(f"say of which run: lockstep checkpoints {name} runs/NAME")
    return str(parsed.run)


def _failed(name: str, error: Exception) -> int:
    print(f"lockstep {name}: {harmless(str(error))}", file=sys.stderr)
    return EXIT_FAILED


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


#: The commands of this file.
COMMANDS = (
    Command("export", "write a trained model to a file or a directory", _export_options, _export),
    Command("checkpoints list", "show what a run has saved", _list_options, _list),
    Command("checkpoints verify", "compare checkpoints with their checksums", _verify_options, _verify),
    Command("checkpoints prune", "remove older checkpoints", _prune_options, _prune),
)
