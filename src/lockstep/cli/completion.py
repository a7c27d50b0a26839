"""``lockstep completion``: what a shell needs to complete the words of each command."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from lockstep.cli.command import Command, Parser
from lockstep.cli.option_formatting import STRATEGIES
from lockstep.cpython_private import actions_of
from lockstep.settings import Settings
from lockstep.strategy_kinds import strategy_names

SHELLS: Final = ("bash", "zsh", "tcsh")
#: What an option's value is, by the word that its help has for it: a directory or a file.
_DIRECTORIES: Final = ("DIR", "RUN", "RUN_DIR")
_FILES: Final = ("FILE", "FILE.svg", "OUT", "script.py", "search.py", "...")


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
    parser.add_argument("shell", nargs="?", choices=SHELLS, help="which shell")
    return parser


def completion(shell: str, commands: Mapping[str, Command], short: Mapping[str, str]) -> str:
    """The script that completes ``commands``, and ``short`` forms of their first words, in ``shell``: of `SHELLS`."""
    # Late, for the other commands do without it.
    import shtab

    root = argparse.ArgumentParser(prog="lockstep", add_help=False)
    groups = {"": root.add_subparsers()}
    for name, command in commands.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            groups[group] = (
                groups[""]
                .add_parser(
                    group, help=f"commands: {group} ...", aliases=[word for word in short if short[word] == group]
                )
                .add_subparsers()
            )
        options = command.options()
        for action in actions_of(options):
            _say_values(action, {"DIRECTORY": shtab.DIRECTORY, "FILE": shtab.FILE})
        groups[group].add_parser(last, help=command.does, parents=[options], add_help=False)
    return str(shtab.complete(root, shell))


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
