"""The options of ``lockstep tune`` that show, draw, export or import a search, and start no trial."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys

from lockstep.errors import SettingError
from lockstep.launch_contract import EXIT_OK


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """The options that start no trial; the one positional argument is then the directory of the search."""
    group = parser.add_argument_group("instead of searching; search.py is then the directory of a search")
    group.add_argument("--show", action="store_true", help="counts, the best trials of each island, failures")
    group.add_argument(
        "--top", type=int, default=5, metavar="N", help="with --show: number of trials of each island (default: 5)"
    )
    group.add_argument("--json", action="store_true", help="like --show, but everything as JSON, for programs")
    group.add_argument(
        "--enqueue",
        action="append",
        metavar="NAME=VALUE[,...]",
        help="evaluate a trial with these parameters next; several times: several trials",
    )
    group.add_argument("--pictures", metavar="DIR", help="draw it as SVG, with the numbers as CSV and JSON")
    group.add_argument("--to-optuna", metavar="FILE", help="export it to a study of Optuna: FILE.db or a URL")
    group.add_argument(
        "--from-optuna", metavar="FILE", help="begin a search in the directory with the trials of a study"
    )
    group.add_argument(
        "--study", metavar="NAME", help="name of the study (default: the directory's; to import: the only one)"
    )


def wants_results(parsed: argparse.Namespace) -> bool:
    """Whether one of these options was given."""
    return any((parsed.show, parsed.json, parsed.pictures, parsed.to_optuna, parsed.from_optuna, parsed.enqueue))


def show_results(parsed: argparse.Namespace, run_dir: str | None) -> int:
    """Do what these options ask for with the search in ``run_dir``; returns the exit code.

    Raises:
        SettingError: if there is no such search, or an option does not fit.
    """
    # Late, for it loads numpy.
    from lockstep.tune import Space, draw_pictures, export_optuna, has_optuna, import_optuna, load, show
    from lockstep.tune import enqueue as enqueue_trials

    if run_dir is None:
        raise SettingError("give the directory of a search: lockstep tune --show runs/NAME")
    if parsed.top < 1:
        raise SettingError(f"--top {parsed.top}: give at least 1")
    if parsed.from_optuna:
        count = import_optuna(parsed.from_optuna, run_dir, parsed.study)
        print(f"{count} trials of {parsed.from_optuna} are in {run_dir}", file=sys.stderr)
    result = load(run_dir)
    if parsed.enqueue:
        space = Space.from_json(result.record.space)
        params = [space.params_of_words(words) for words in parsed.enqueue]
        for number, words in zip(enqueue_trials(run_dir, params), parsed.enqueue, strict=True):
            waits = number >= int(result.record.settings.get("trials", 0))
            print(
                f"trial {number} will have {words}"
                + (f", once the search is resumed with --trials {number + 1} or more" if waits else ""),
                file=sys.stderr,
            )
    if parsed.to_optuna:
        name = export_optuna(run_dir, parsed.to_optuna, parsed.study)
        print(f"study {name} is in {parsed.to_optuna}", file=sys.stderr)
    if parsed.pictures:
        _say("\n".join(map(str, draw_pictures(result.record, parsed.pictures))))
        if not has_optuna():
            print("parallel coordinates and importances are drawn by optuna: pip install optuna", file=sys.stderr)
    if parsed.json:
        _say(json.dumps(result.to_json(parsed.top)))
    elif parsed.show:
        _say(show(result.record, shutil.get_terminal_size((100, 24)).columns, parsed.top))
    return EXIT_OK


def _say(text: str) -> None:
    """Print ``text``; a pipe that its reader has closed, as `head` does, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Else what is left in the buffer would fail again when Python ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
