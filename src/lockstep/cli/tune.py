"""``lockstep tune``: begins, resumes, joins or shows a search."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from lockstep.cli.command import Command, Parser, option_lines, split_at_script
from lockstep.cli.setting_options import add_setting_options, settings_of
from lockstep.errors import SettingError
from lockstep.formatting import command_line
from lockstep.launch_contract import EXIT_OK
from lockstep.settings import Interval
from lockstep.world import World

#: They say where and how a search begins: a later command says that itself.
_BEGINNING = ("--resume", "--fresh", "--join")
#: How long a machine waits for the first machine to begin the search.
_MEET_S = 600.0
#: Options that are settings of the search, with the names that these have.
_OPTIONS = {
    "trials": "trials",
    "seed": "seed",
    "islands": "islands",
    "algorithm": "algorithm",
    "stopping": "stopping",
    "retries": "retries",
    "keep_trials": "keep_trials",
    "patience": "patience",
    "min_improvement": "min_improvement",
    "repeats": "repeats",
    "repeat_best": "repeat_best",
}


def tune_options() -> Parser:
    """The options of ``lockstep tune``."""
    parser = Parser(
        prog="lockstep tune",
        usage="lockstep tune [options] search.py [script options]",
        description="Search for hyperparameters with the script's call of lockstep.tune(objective, space). Each worker "
        "evaluates one trial at a time, on ranks of its own. With --show and the like: show a search instead.",
        allow_abbrev=False,
        formatter_class=option_lines(34),
        epilog="Options after the script are the script's own. Exit codes: 0 done, 1 no trial has a loss or the script "
        "failed, 2 usage, 75 stopped, run it again with --resume.",
    )
    workers = parser.add_argument_group("workers of this machine")
    workers.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of trials at a time (default: as many as the GPUs allow; 1 without GPUs)",
    )
    workers.add_argument(
        "--ranks-per-worker",
        default="1",
        metavar="N[,N...]",
        help="ranks of each trial; or one number for each worker (default: 1)",
    )
    workers.add_argument(
        "--hang-after",
        type=float,
        metavar="SECONDS",
        help="without progress before a trial counts as hanging (default: by its pace)",
    )
    workers.add_argument(
        "--grace", type=float, default=10.0, metavar="SECONDS", help="from SIGTERM to SIGKILL (default: 10)"
    )
    search = parser.add_argument_group("the search; these override the arguments of tune(...)")
    search.add_argument("--trials", type=int, metavar="N", help="in total; those from before a resume count")
    search.add_argument("--seed", type=int, metavar="N", help="of the search and of each training")
    search.add_argument("--islands", type=int, metavar="N", help="number of populations, with migration between them")
    search.add_argument(
        "--algorithm", metavar="WORDS", help="the search algorithm, such as gp or cma-es (default: auto)"
    )
    search.add_argument(
        "--stopping", metavar="WORDS", help="rule that stops trials early, such as asha:eta=3 or patience:5"
    )
    search.add_argument(
        "--retries", type=int, metavar="N", help="further attempts at a trial that hung or was killed (default: 1)"
    )
    search.add_argument(
        "--keep-trials", type=int, metavar="N", help="number of the best trials that keep checkpoints (default: 5)"
    )
    search.add_argument(
        "--patience", type=int, metavar="N", help="no trial begins once N trials have not improved the best loss"
    )
    search.add_argument(
        "--min-improvement", type=float, metavar="X", help="part of the loss that counts as one, such as 0.01"
    )
    search.add_argument(
        "--repeats", type=int, metavar="N", help="evaluate the best trials N times again, with other seeds (default: 0)"
    )
    search.add_argument("--repeat-best", type=int, metavar="N", help="how many of the best trials (default: 5)")
    search.add_argument(
        "--from",
        dest="warm_start",
        action="append",
        metavar="RUN[:NAME=VALUE,...]",
        help="begin from the trials of another search; several times: of several",
    )
    search.add_argument("--time-limit", metavar="TIME", help="no trial begins after that time, such as '2 h'")
    files = parser.add_argument_group("files")
    files.add_argument("--run-dir", metavar="DIR", help="directory of the search (default: a new one under runs/)")
    files.add_argument("--resume", action="store_true", help="go on with the search in the run directory")
    files.add_argument("--fresh", action="store_true", help="move an earlier search in the run directory aside")
    files.add_argument("--join", action="store_true", help="add workers to the search that runs in the run directory")
    settings = parser.add_argument_group("settings of each trial's run; they override those of the script")
    add_setting_options(settings, "checkpoint")  # each trial has a directory of its own
    _add_result_options(parser)
    parser.add_argument("-m", "--module", action="store_true", help="search.py is a module name, as in python -m")
    parser.add_argument(
        "script", nargs="?", metavar="search.py", help="the script; or the directory of a search to show"
    )
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="the script's own options")
    return parser


def _tune(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    if _wants_results(parsed):
        # What follows the directory is no script's.
        results = Parser(prog="lockstep tune", allow_abbrev=False)
        _add_result_options(results)
        results.parse_args(parsed.args, namespace=parsed)
        return _show_results(parsed, parsed.script)
    if parsed.script is None:
        raise SettingError("give a script: lockstep tune search.py, or a search: lockstep tune --show runs/NAME")
    # Late, for what it loads is needed only from here on.
    from lockstep.launch import Machine, Module, Script, asks_for_help, check_program, show_help, without_options
    from lockstep.tune import Driver, SearchRequest, join_directory, open_directory, visible_gpus, worker_sizes

    own, of_script = split_at_script(parsed, words)
    program = (Module if parsed.module else Script)(parsed.script, of_script)
    check_program(program)
    if asks_for_help(program):
        return show_help(program)
    ranks = _numbers(parsed.ranks_per_worker)
    gpus = len(visible_gpus(Machine.detect(os.environ), os.environ))
    workers = parsed.workers
    if workers is None:
        workers = len(ranks) if len(ranks) > 1 else max(1, gpus // ranks[0])
    sizes = worker_sizes(workers, ranks)
    settings, options = settings_of(parsed), _options(parsed)
    world = World.from_env(os.environ)
    if world.size > 1 and parsed.run_dir is None:
        raise SettingError(
            f"{world.launcher} has started this command {world.size} times: give all of them the same --run-dir"
        )
    if parsed.join or world.rank:
        directory = join_directory(parsed.run_dir, within_s=0.0 if parsed.join else _MEET_S)
    else:
        directory = open_directory(
            parsed.run_dir, program.stem, datetime.now(), resume=parsed.resume, fresh=parsed.fresh
        )
    if parsed.join:
        options = {**directory.options(), **options}  # such as how many trials: all workers end with the same one
    repeated = without_options(own, _BEGINNING, valued=["--run-dir"])
    again = ["lockstep", "tune", "--resume", "--run-dir", _shown(directory.path), *repeated]
    request = SearchRequest(
        program,
        directory,
        sizes,
        workers=len(sizes) * world.size,
        options=options,
        settings=settings,
        hang_after_s=parsed.hang_after,
        grace_s=parsed.grace,
        again=command_line([*again, parsed.script, *of_script]),
    )
    return Driver(request, sys.stdout, sys.stderr).run()


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise SettingError(f"--ranks-per-worker {text}: give a number, or one for each worker, such as 2,1") from None


def _options(parsed: argparse.Namespace) -> dict[str, object]:
    """What the command line says of the search, by the names of its settings."""
    given = {name: getattr(parsed, option) for option, name in _OPTIONS.items() if getattr(parsed, option) is not None}
    if parsed.time_limit is not None:
        span = Interval.parse(parsed.time_limit, "--time-limit")
        if span.unit != "second":
            raise SettingError(f"--time-limit {parsed.time_limit}: give a time, such as '2 h' or '90 min'")
        given["time_limit_s"] = span.every
    if parsed.warm_start is not None:
        given["warm_start"] = [os.path.abspath(source) for source in parsed.warm_start]
    return given


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _add_result_options(parser: argparse.ArgumentParser) -> None:
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


def _wants_results(parsed: argparse.Namespace) -> bool:
    """Whether one of these options was given."""
    return any((parsed.show, parsed.json, parsed.pictures, parsed.to_optuna, parsed.from_optuna, parsed.enqueue))


def _show_results(parsed: argparse.Namespace, run_dir: str | None) -> int:
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


COMMANDS = (Command("tune", "search for hyperparameters, each trial on one rank or several", tune_options, _tune),)
