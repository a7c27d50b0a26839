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
        usage="lockstep top [--once] RUN_DIR",
        description="Show a run as it is now, from another terminal, until it ends: live on a terminal, else as lines.",
        allow_abbrev=False,
    )
    parser.add_argument("--once", action="store_true", help="show it once and leave")
    parser.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help="its run directory, such as runs/train-...")
    return parser


def _top(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    # Late, for the other commands do without it.
    from lockstep.report import top

    if parsed.run_dir is None:
        raise SettingError("say which run: lockstep top runs/NAME")
    if (Path(parsed.run_dir) / "search.json").exists():
        from lockstep.tune import watch_directory

        with contextlib.suppress(KeyboardInterrupt):
            watch_directory(Path(parsed.run_dir), sys.stdout, once=parsed.once)
        return EXIT_OK
    with contextlib.suppress(KeyboardInterrupt):
        top(Path(parsed.run_dir), sys.stdout, os.environ, once=parsed.once)
    return EXIT_OK


#: The command of this file.
COMMANDS = (Command("top", "watch a run from another terminal", _top_options, _top),)
