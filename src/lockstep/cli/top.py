"""``lockstep top``: a run or a search as it is now, from another terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.cli.command import Command, Parser
from lockstep.errors import SettingError
from lockstep.launch_contract import EXIT_OK


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


#: The command of this file.
COMMANDS = (Command("top", "watch a run from another terminal", _top_options, _top),)
