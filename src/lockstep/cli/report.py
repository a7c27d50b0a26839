"""``lockstep report``: a page of HTML over runs."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.command import Command, Parser
from lockstep.errors import SettingError
from lockstep.launch_contract import EXIT_OK

if TYPE_CHECKING:  # loads what the other commands do without
    from lockstep.html_report import Attachment


def _report_options() -> Parser:
    """The options of ``lockstep report``."""
    parser = Parser(
        prog="lockstep report",
        usage="lockstep report [options] RUN [RUN ...]",
        description="Write one HTML file about a run, or to compare several: what was run, all curves, where the time "
        "went, ranks, checkpoints, failures, and what other commands have written in or beside the run directory. It "
        "opens in any browser, from a disk and without a network.",
        allow_abbrev=False,
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="the file (default: report.html in the first RUN)")
    parser.add_argument(
        "--add", action="append", default=[], metavar="FILE", help="also show this JSON or SVG file; may be repeated"
    )
    parser.add_argument("--watch", action="store_true", help="serve the page to this machine while the run goes on")
    parser.add_argument("--port", type=int, default=0, help="with --watch (default: a free one)")
    parser.add_argument(
        "--list", metavar="DIR", help="instead, a page over all runs below DIR (default of -o: DIR/runs.html)"
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run directory, or that of a search")
    return parser


def _report(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    # Late, for the other commands do without it.
    from lockstep.html_report import REPORT, attached_files, list_page, read_run, report_page, serve
    from lockstep.tune import is_search

    runs, others = [Path(run) for run in parsed.runs], [Path(file) for file in parsed.add]
    if (parsed.list is None) != bool(runs):
        raise SettingError("say which run: lockstep report runs/NAME; or for all of them: lockstep report --list runs")
    if parsed.list is not None:
        return _write(Path(parsed.output or Path(parsed.list, "runs.html")), list_page(Path(parsed.list)))
    searches = [run for run in runs if is_search(run)]
    trained = [run for run in runs if run not in searches]
    if parsed.watch:
        if searches:
            raise SettingError(f"--watch {searches[0]}: it is a search; watch it with lockstep top {searches[0]}")
        with contextlib.suppress(KeyboardInterrupt):
            serve(trained, others, parsed.port, lambda address: print(address, flush=True))
        return EXIT_OK
    attached = [*map(_searched, searches), *attached_files(runs, others)]
    return _write(Path(parsed.output or runs[0] / REPORT), report_page([*map(read_run, trained)], attached))


def _searched(run_dir: Path) -> Attachment:
    """What a search has found, with its pictures."""
    import tempfile

    from lockstep.html_report import Attachment
    from lockstep.tune import draw_pictures, load

    result = load(run_dir)
    with tempfile.TemporaryDirectory() as place:
        drawn = [path for path in draw_pictures(result.record, place) if path.suffix == ".svg"]
        pictures = tuple(path.read_bytes() for path in drawn)
    return Attachment(f"Search in {run_dir}", result.to_json(), pictures)


def _write(file: Path, page: str) -> int:
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise SettingError(f"{file} cannot be written: {error.strerror}; give another with -o FILE") from None
    print(file, file=sys.stderr)
    return EXIT_OK


#: The command of this file.
COMMANDS = (Command("report", "write a page about runs: curves, time, ranks, failures", _report_options, _report),)
