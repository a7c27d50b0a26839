"""The command ``lockstep``: parse, call one room, print.

Torch-free, and each command loads its room only when it is called, so that help and usage errors answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import lockstep
from lockstep.cli.bench import COMMANDS as BENCH_COMMANDS
from lockstep.cli.command import STRATEGIES, Command, Parser, option_lines, say, split_at_script
from lockstep.cli.config import COMMANDS as CONFIG_COMMANDS
from lockstep.cli.config import file_options, file_words
from lockstep.cli.doctor import COMMANDS as DOCTOR_COMMANDS
from lockstep.cli.predict import COMMANDS as PREDICT_COMMANDS
from lockstep.cli.report import COMMANDS as REPORT_COMMANDS
from lockstep.cli.run_options import INSTEAD, accept_underscores, moment, node_options, nodes_of, run_options
from lockstep.cli.saved_run import COMMANDS as SAVED_RUN_COMMANDS
from lockstep.cli.setting_options import settings_of
from lockstep.cli.tune import COMMANDS as TUNE_COMMANDS
from lockstep.cli.verify import COMMANDS as VERIFY_COMMANDS
from lockstep.cli.verify import FILE as VERIFY_FILE
from lockstep.cli.verify import said_of
from lockstep.cpython_private import actions_of, add_action
from lockstep.errors import LaunchError, LockstepError, SettingError
from lockstep.formatting import command_line, did_you_mean, harmless
from lockstep.launch_contract import EXIT_FAILED, EXIT_OK, EXIT_USAGE, PROJECT, PROJECT_SETTINGS
from lockstep.project_files import fix_project, project_files, resolve_settings
from lockstep.report import refuse_unknown_trackers
from lockstep.script_end import leave
from lockstep.settings import Settings
from lockstep.strategy_kinds import read_strategy, strategy_names

if TYPE_CHECKING:
    from lockstep.launch import Module, Script


_EXAMPLES = """\
examples:
  lockstep run train.py --epochs 10                     one rank for each GPU, else one
  lockstep run --nproc-per-node 4 --max-restarts 3 train.py
  lockstep run --resume --run-dir runs/digits train.py  from the newest whole checkpoint"""

#: Options of `run` that a job script does not take: the job says it.
_PLACES = {
    *("--help", "--nnodes", "--standalone", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--rdzv-backend"),
    *("--node-rank", "--master-addr", "--master-port", "--attach", "--fit"),
    *("--max-changes", "--spares", "--rdzv-takeover"),
}
_BY_JOB = "leave it out: the job itself says where its machines meet; --nodes N says how many there are"
#: Short forms of commands.
_SHORT = {"ckpt": "checkpoints"}
#: They say where and how a run begins, and what the words after them are: a later command says that itself.
_BEGINNING = ("--resume", "--fresh", "-m", "--module", "--no-python", "--")
_BEGINNING_WITH_VALUE = ("--run-dir", "--resume-from")


#: Shells whose words ``lockstep completion`` completes.
_SHELLS: Final = ("bash", "zsh", "tcsh")
#: What an option's value is, by the word that its help has for it: a directory or a file.
_DIRECTORIES: Final = ("DIR", "RUN", "RUN_DIR")
_FILES: Final = ("FILE", "FILE.svg", "OUT", "script.py", "search.py", "...")


def run_command() -> int:
    """Carry out the command line of this process, which ends then; returns its exit code."""
    _open_closed_streams()
    code = main()
    if any(thread.daemon and thread.name.startswith("lockstep ") for thread in threading.enumerate()):
        # It waits in compiled code for a network or a file system, and would abort an interpreter that ends.
        leave(code)
    return code


def _open_closed_streams() -> None:
    """Standard streams that are closed, as under some daemons, are empty ones from here on.

    Else the next files and sockets of this process would be taken for them, also by processes that it starts.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest number that is free, which is that of the stream.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open as long as this process
            os.set_inheritable(getattr(sys, name).fileno(), True)


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command line; returns the exit code. A usage error is reported in one line, with a way out."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return EXIT_OK
    if words[0] in ("-V", "--version"):
        print(f"lockstep {lockstep.__version__}")
        return EXIT_OK
    words[0] = _SHORT.get(words[0], words[0])
    group = [known for known in COMMANDS if known.startswith(f"{words[0]} ")]
    if group and words[1:] in (["-h"], ["--help"]):
        print("\n".join(f"lockstep {known:<20}{COMMANDS[known].does}" for known in group))
        return EXIT_OK
    # Some commands are two words, such as: job slurm.
    length = 2 if group else 1
    name, rest = " ".join(words[:length]), words[length:]
    before = {variable: os.environ.get(variable) for variable in (PROJECT, PROJECT_SETTINGS)}
    try:
        if name not in COMMANDS:
            raise SettingError(f"no such command: {name}; {_meant(name)}")
        command = COMMANDS[name]
        options = command.options()
        fix_project(os.environ)
        if not {"-h", "--help"} & {*rest[:1]}:
            rest = [*file_words(name, options), *rest]
        parsed, unknown = options.parse_known_args(rest)
        if unknown:
            raise SettingError(_advice(unknown[0], command))
        return command.act(parsed, rest)
    except LockstepError as error:
        # It may name what a file or another host says.
        text = harmless(str(error), keep="\n")
        print(f"lockstep{f' {name}' if name in COMMANDS else ''}: {text}", file=sys.stderr)
        return EXIT_FAILED if isinstance(error, LaunchError) else EXIT_USAGE
    finally:
        # What was handed on to processes of this command is not for the next one of a program that calls this.
        for variable, value in before.items():
            os.environ.pop(variable, None)
            os.environ |= {} if value is None else {variable: value}


def _run(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    if parsed.script is None:
        raise SettingError("say what to run: lockstep run train.py")
    settings = _settings(parsed)
    if parsed.resume_from not in (None, "best") and not parsed.resume_from.isdecimal():
        raise SettingError(f"--resume-from {parsed.resume_from}: give best, or the step of a checkpoint")
    if parsed.resume_from is not None:
        _check_resume_from(parsed.resume_from, settings.get("checkpoint") or parsed.run_dir)
    # Late, for what it loads is needed only from here on.
    from lockstep.launch import (
        Request,
        asks_for_help,
        check_program,
        show_help,
        start,
        unread_options,
        without_options,
    )

    own, of_script = split_at_script(parsed, words)
    program = _program(parsed, of_script)
    if asks_for_help(program):
        check_program(program)
        return show_help(program)
    known = [option for action in actions_of(run_options()) for option in action.option_strings]
    if ours := unread_options(program, known):
        print(
            f"note: {parsed.script} gets {', '.join(ours)}, which its source does not mention; options of lockstep run "
            f"come before the script: lockstep run {ours[0]} ... {parsed.script}",
            file=sys.stderr,
        )
    if not parsed.no_python and Path(VERIFY_FILE).is_file() and (said := said_of(program)):
        say(said)
    if parsed.fit:
        settings["micro_batch"] = _fitting_micro_batch(parsed, program, settings)
        own = [*(word for word in own if word != "--fit"), "--set", f"micro_batch={settings['micro_batch']}"]
    return start(
        Request(
            program,
            nproc_per_node=parsed.nproc_per_node,
            run_dir=parsed.run_dir,
            resume=parsed.resume or parsed.resume_from is not None,
            resume_from=parsed.resume_from,
            fresh=parsed.fresh,
            max_restarts=parsed.max_restarts,
            refill_after_s=parsed.refill_after,
            settings=settings,
            bind=parsed.bind,
            grace_s=parsed.grace,
            hang_after_s=parsed.hang_after,
            on_hang=parsed.on_hang,
            start_method=parsed.start,
            nodes=nodes_of(parsed),
            among_nodes=node_options(parsed),
            attach=parsed.attach,
            pass_local_rank=parsed.pass_local_rank,
            faults="; ".join(parsed.fault),
            ends_at_s=None if parsed.ends_at is None else moment(parsed.ends_at, datetime.now()),
            requeue=parsed.requeue,
            everywhere=not parsed.standalone,
            options=without_options(own, _BEGINNING, valued=_BEGINNING_WITH_VALUE),
        )
    )


def _fitting_micro_batch(parsed: argparse.Namespace, program: Script | Module, settings: Mapping[str, str]) -> str:
    """The largest micro-batch that fits on this machine, found by short runs of ``program``; says so on stderr.

    Args:
        parsed: the command line of ``lockstep run``.
        program: what it starts.
        settings: what it sets.

    Raises:
        SettingError: where there is nothing to find, or nothing fits.
    """
    # Late, for what it loads is needed only from here on.
    from lockstep.launch import Machine, Request, ranks_of
    from lockstep.scale import fit_micro_batch

    for given, why in (
        ("micro_batch" in settings, "micro_batch is given by --set"),
        (parsed.resume or parsed.resume_from is not None, "a resumed run keeps its micro_batch"),
        (parsed.requeue, "a job that is requeued keeps its micro_batch"),
        (parsed.nnodes != "1", "it is found on one machine; find it there, and give --set micro_batch= on all of them"),
    ):
        if given:
            raise SettingError(f"--fit: {why}")
    request = Request(program, nproc_per_node=parsed.nproc_per_node)
    ranks, _ = ranks_of(request, Machine.detect(os.environ), os.environ)
    return str(fit_micro_batch(program, ranks, settings, say))


def _check_resume_from(wanted: str, directory: str | None) -> None:
    """Check that the run in ``directory`` has the checkpoint; a script that names another one is asked itself.

    Raises:
        SettingError: if it has not.
    """
    # Late, for the other commands do without it.
    from lockstep.saved_run import BEST, rows

    try:
        there = rows(directory) if directory is not None else []
    except SettingError:
        return
    if there and not any(row.best if wanted == BEST else row.step == int(wanted) for row in there):
        steps = ", ".join(str(step) for step in sorted(row.step for row in there))
        what = "no best one: give Run(best='max accuracy'), or a step of" if wanted == BEST else "checkpoints of steps"
        raise SettingError(f"--resume-from {wanted}: {directory} has {what} {steps}")


def _program(parsed: argparse.Namespace, args: tuple[str, ...]) -> Any:
    """What is to be run."""
    # Late, for help and usage errors do without it.
    from lockstep.launch import Executable, Module, Script

    if parsed.module and parsed.no_python:
        raise SettingError("-m and --no-python contradict each other; give one of them")
    kind = Module if parsed.module else Executable if parsed.no_python else Script
    return kind(parsed.script, args)


def job_options(name: str) -> Parser:
    """The options of ``lockstep job``: what the scheduler ``name`` is asked for, and those of ``lockstep run``."""
    # Late, for the other commands do without it.
    from lockstep.launch import JOB_SCRIPT_SCHEDULERS

    scheduler, table = JOB_SCRIPT_SCHEDULERS[name], f"[{name}]"
    parser = Parser(
        prog=f"lockstep job {name}",
        usage=f"lockstep job {name} [options] script.py [script options]",
        description=f"Write a complete job script, to stdout or a file. What is not given here may stand in the table "
        f"{table} of lockstep.toml, under the same names; and setup and extra there, lists of "
        "shell lines before the launcher and of more options for the scheduler.",
        allow_abbrev=False,
        formatter_class=option_lines(32),
        epilog="Options of lockstep run may be given too, before the script.",
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="machines (default: 1)")
    parser.add_argument("--gpus", metavar="N", help=scheduler.gpus_help)
    parser.add_argument("--cpus", type=int, metavar="N", help="of each node")
    parser.add_argument("--time", metavar="TIME", help="12:00:00, 90m, 12h, 2d, 2-12")
    for option in scheduler.options:
        parser.add_argument(f"--{option.name.replace('_', '-')}", metavar=option.metavar, help=option.help)
    parser.add_argument("--account", metavar="NAME", help="who pays")
    parser.add_argument("--name", metavar="NAME", help="of the job (default: the script's)")
    parser.add_argument("-o", "--output", metavar="FILE", help="where the script is written (default: stdout)")
    for action in actions_of(run_options()):
        if action.option_strings and not set(action.option_strings) & _PLACES:
            # Known to both, so that a usage error is found here and not in the queue.
            add_action(parser, action)
    parser.add_argument("script", nargs="?", metavar="script.py")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="the script's own options")
    accept_underscores(parser)
    return parser


def _job(name: str, parsed: argparse.Namespace, words: Sequence[str]) -> int:
    _settings(parsed)
    # Late, for what it loads is needed only from here on.
    from lockstep.launch import (
        JOB_SCRIPT_SCHEDULERS,
        JobCommand,
        JobRequest,
        check_program,
        job_script,
        kind_options,
    )

    if parsed.script is None:
        raise SettingError(f"say what to run: lockstep job {name} --time 12:00:00 --gpus 4 train.py")
    _, of_script = split_at_script(parsed, words)
    program = _program(parsed, of_script)
    check_program(program)
    scheduler = JOB_SCRIPT_SCHEDULERS[name]
    asked = ("nodes", "gpus", "cpus", "account", "name", *(option.name for option in scheduler.options))
    values: dict[str, Any] = {field: getattr(parsed, field) for field in asked}
    request = JobRequest(**values, time_s=None if parsed.time is None else job_script.seconds(parsed.time))
    files = project_files(os.environ)
    file_options(files, "run", run_options())  # which the job will read
    site = job_script.site_defaults(scheduler, files)
    request = job_script.checked(request.with_defaults(site))
    run = _given(run_options(), parsed)
    requeue = [] if "--requeue" in run else ["--requeue"]
    kind = kind_options(program)
    command = JobCommand(
        argv=(*(sys.executable, "-m", "lockstep", "run", *run, *requeue, *kind, parsed.script, *of_script),),
        directory=str(Path.cwd()),
        stem=program.stem,
        written_by=command_line(["lockstep", "job", name, *words]),
        version=lockstep.__version__,
    )
    script = job_script.write(scheduler, request, command)
    if parsed.output is None:
        print(script, end="")
        return EXIT_OK
    file = Path(parsed.output)
    if file.exists():
        raise SettingError(f"-o {parsed.output}: this file exists already; give another name, or remove it")
    file.write_text(script, encoding="utf-8")
    say(f"{file}: submit it with {scheduler.submit} {file}")
    return EXIT_OK


def completion_options() -> Parser:
    """The options of ``lockstep completion``."""
    parser = Parser(
        prog="lockstep completion",
        usage="lockstep completion bash|zsh|tcsh",
        description="Print what a shell reads to complete commands, options, directories of runs and other files. For "
        "bash: lockstep completion bash > ~/.local/share/bash-completion/completions/lockstep; for zsh: into a file "
        "_lockstep in a directory of $fpath; for tcsh: into a file that ~/.tcshrc sources.",
        allow_abbrev=False,
    )
    parser.add_argument("shell", nargs="?", choices=_SHELLS, help="which shell")
    return parser


def _completion(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    if parsed.shell is None:
        raise SettingError(f"say for which shell: lockstep completion {'|'.join(_SHELLS)}")
    # Late, for the other commands do without it.
    import shtab

    root = argparse.ArgumentParser(prog="lockstep", add_help=False)
    groups = {"": root.add_subparsers()}
    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            groups[group] = (
                groups[""]
                .add_parser(
                    group, help=f"commands: {group} ...", aliases=[word for word in _SHORT if _SHORT[word] == group]
                )
                .add_subparsers()
            )
        options = command.options()
        for action in actions_of(options):
            _say_values(action, {"DIRECTORY": shtab.DIRECTORY, "FILE": shtab.FILE})
        groups[group].add_parser(last, help=command.does, parents=[options], add_help=False)
    print(shtab.complete(root, parsed.shell))
    return EXIT_OK


def _say_values(action: argparse.Action, kinds: Mapping[str, object]) -> None:
    """Let shtab know which values ``action`` takes, of those that are known."""
    one_of = {field.name: field.metadata["one_of"] for field in fields(Settings)} | {"strategy": strategy_names()}
    if action.help and STRATEGIES in action.help:
        action.choices, action.help = strategy_names(), action.help.replace(STRATEGIES, "NAME")
    elif not action.choices and one_of.get(action.dest):
        action.choices = one_of[action.dest]
    if not action.option_strings and action.help == argparse.SUPPRESS:
        action.help = "what is run"  # of which the usage says more than a line of help
    for names, kind in ((_DIRECTORIES, "DIRECTORY"), (_FILES, "FILE")):
        if action.metavar in names:
            action.complete = kinds[kind]  # type: ignore[attr-defined]


def _given(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> list[str]:
    """The options of ``parser`` that ``parsed`` sets, as they are written; without the kind of the program."""
    words: list[str] = []
    for action in actions_of(parser):
        value = getattr(parsed, action.dest, action.default)
        if not action.option_strings or action.dest in ("module", "no_python") or value == action.default:
            continue
        option = max(action.option_strings, key=len).replace("_", "-")
        for each in value if isinstance(value, list) else [value]:
            words += [option] if action.nargs == 0 else [option, str(each)]
    return words


def _settings(parsed: argparse.Namespace) -> dict[str, str]:
    """What the command line sets, checked as far as it can be without the script."""
    given = settings_of(parsed)
    if given.get("checkpoint"):
        # A script may change its directory.
        given["checkpoint"] = str(Path(given["checkpoint"]).absolute())
    by_environment = resolve_settings({}, os.environ).values
    read_strategy(given.get("strategy", by_environment.strategy))
    if (track := given.get("track", "none")) != "none":
        refuse_unknown_trackers(track)
    return given


def _names() -> list[str]:
    return [field.name for field in fields(Settings)]


def _advice(unknown: str, command: Command) -> str:
    option = unknown.partition("=")[0]
    spelt = option.replace("_", "-")
    if command.name.startswith(("run", "job ")) and (instead := INSTEAD.get(spelt)):
        named_by_job = command.name != "run" and any(place in instead for place in _PLACES)
        return f"no such option: {option}; {_BY_JOB if named_by_job else instead}"
    parser = command.options()
    known = [o for action in actions_of(parser) for o in action.option_strings if "_" not in o]
    if spelt.removeprefix("--").replace("-", "_") in _names():
        return f"no such option: {option}; it is a setting: --set {spelt.removeprefix('--').replace('-', '_')}=VALUE"
    if near := difflib.get_close_matches(spelt, known, n=1):
        return f"no such option: {option}; did you mean {near[0]}?"
    place = parser.of_script
    return f"no such option: {option}; options of the script come {place}, ours are in: lockstep {command.name} -h"


def _meant(name: str) -> str:
    names = f"there are {', '.join(COMMANDS)}; see: lockstep --help"
    return did_you_mean(name, COMMANDS, f"to start a script: lockstep run {name}" if name.endswith(".py") else names)


def _overview() -> str:
    commands = "\n".join(f"  {command.name:<20}{command.does}" for command in COMMANDS.values())
    return (
        "Data-parallel PyTorch training whose result does not depend on how many GPUs computed it.\n\n"
        f"commands (lockstep COMMAND --help says more):\n{commands}\n\n{_EXAMPLES}"
    )


COMMANDS = {
    command.name: command
    for command in (
        Command("run", "start a script on several ranks and watch over them", run_options, _run),
        *REPORT_COMMANDS,
        *VERIFY_COMMANDS,
        *CONFIG_COMMANDS,
        *DOCTOR_COMMANDS,
        *BENCH_COMMANDS,
        *PREDICT_COMMANDS,
        *TUNE_COMMANDS,
        *SAVED_RUN_COMMANDS,
        Command("job slurm", "write a job script for Slurm", partial(job_options, "slurm"), partial(_job, "slurm")),
        Command("job sge", "write a job script for Grid Engine", partial(job_options, "sge"), partial(_job, "sge")),
        Command("completion", "complete these words in a shell", completion_options, _completion),
    )
}
