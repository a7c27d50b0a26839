"""``lockstep report``, a page of HTML over runs, and ``lockstep top``: a run or a search as it is now."""

from __future__ import annotations

import argparse
import contextlib
import os
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


def _top_options() -> Parser:
    """The options of ``lockstep top``."""
    parser = Parser(
        prog="lockstep top",
        usage="lockstep top [--once] [--prometheus WHERE] RUN_DIR [...]",
        description="Show a run as it is now, from another terminal, until it ends: live on a terminal, else as lines.",
        allow_abbrev=False,
    )
    parser.add_argument("--once", action="store_true", help="show it once and leave")
    parser.add_argument(
        "--prometheus",
        metavar="WHERE",
        help="instead, offer metrics of one or several runs, or of all in a directory, to Prometheus: HOST:PORT, a "
        "PORT of 127.0.0.1, or FILE.prom for node_exporter",
    )
    parser.add_argument("--token-file", metavar="FILE", help="with --prometheus: each request must bear what is in it")
    parser.add_argument("run_dirs", nargs="*", metavar="RUN_DIR", help="its run directory, such as runs/train-...")
    return parser


def _top(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    # Late, for the other commands do without it.
    from lockstep.report import export_metrics, top

    run_dirs = [Path(run_dir) for run_dir in parsed.run_dirs]
    if not run_dirs:
        raise SettingError("say which run: lockstep top runs/NAME")
    if parsed.prometheus is not None:
        token = "" if parsed.token_file is None else _token(Path(parsed.token_file))
        with contextlib.suppress(KeyboardInterrupt):
            export_metrics(run_dirs, parsed.prometheus, token, lambda text: print(text, flush=True), once=parsed.once)
        return EXIT_OK
    if len(run_dirs) > 1 or parsed.token_file is not None:
        raise SettingError("one run is shown at a time; --prometheus WHERE takes several, and a token")
    from lockstep.tune import is_search

    if is_search(run_dirs[0]):
        from lockstep.tune import watch_directory

        with contextlib.suppress(KeyboardInterrupt):
            watch_directory(run_dirs[0], sys.stdout, once=parsed.once)
        return EXIT_OK
    with contextlib.suppress(KeyboardInterrupt):
        top(run_dirs[0], sys.stdout, os.environ, once=parsed.once)
    return EXIT_OK


def _token(file: Path) -> str:
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise SettingError(f"--token-file {file} cannot be read: {error}") from None
    if not token:
        raise SettingError(
            f"--token-file {file} is empty; write a secret into it, such as that of: openssl rand -hex 32"
        )
    return token


#: The commands of this file.
COMMANDS = (
    Command("top", "watch a run from another terminal", _top_options, _top),
    Command("report", "write a page about runs: curves, time, ranks, failures", _report_options, _report),
)
