"""Shells complete the words of the command line: real ones, on a terminal, by the key for it."""

import argparse
import os
import pty
import shlex
import shutil
import subprocess
import sys

import pytest

from lockstep import cli
from lockstep.cpython_private import actions_of
from waiting import wait_until

SETUP = {
    "bash": (["--norc", "--noprofile", "-i"], "PS1='RE''ADY '; source {script}"),
    "zsh": (["-f", "-i"], "PS1='RE''ADY '; fpath=({directory} $fpath); autoload -U compinit; compinit -u -D"),
    "tcsh": (["-f"], "set prompt='RE''ADY '; set edit; source {script}"),
}
SHELLS = [pytest.param(name, marks=pytest.mark.skipif(not shutil.which(name), reason=f"no {name}")) for name in SETUP]


@pytest.fixture
def place(tmp_path):
    """A directory with a run, a script, and a `lockstep` that writes down its words."""
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    (tmp_path / "train.py").touch()
    command = tmp_path / "bin" / "lockstep"
    command.parent.mkdir()
    command.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words.new; mv {tmp_path}/words.new {tmp_path}/words\n'
    )
    command.chmod(0o755)
    return tmp_path


def completed(shell, place, keys):
    """The words that ``lockstep`` gets after these keys on a terminal; a tab asks for a completion."""
    (place / "_lockstep").write_text(printed(shell))
    flags, setup = SETUP[shell]
    ours, theirs = pty.openpty()
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    env = {"PATH": path, "HOME": str(place), "TERM": "vt100", "LC_ALL": "C"}
    process = subprocess.Popen(
        [shell, *flags], cwd=place, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    shown = ""
    try:
        os.write(ours, (setup.format(script=place / "_lockstep", directory=place) + "\n").encode())
        while "READY " not in shown:
            shown += os.read(ours, 4096).decode()
        os.write(ours, f"lockstep {keys}\n".encode())
        wait_until((place / "words").exists, deadline_s=10)
        return (place / "words").read_text().replace("/\n", "\n").split()
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def printed(shell):
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "completion", shell], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("exp\t", ["export"]),
        ("run tr\t", ["run", "train.py"]),
        ("run --run-d\t ru\tdig\t", ["run", "--run-dir", "runs/digits"]),
        ("checkpoints pr\t", ["checkpoints", "prune"]),
        ("run --precision bf\t train.py", ["run", "--precision", "bf16", "train.py"]),
    ],
)
def test_a_word_is_completed(shell, keys, words, place):
    assert completed(shell, place, keys) == words


@pytest.mark.parametrize("shell", SHELLS[:2])  # tcsh knows only the place of a word in the line
def test_a_script_is_completed_behind_options(shell, place):
    assert completed(shell, place, "run --nproc\t 2 tr\t") == ["run", "--nproc-per-node", "2", "train.py"]


def test_each_command_and_option_is_known_and_hidden_ones_are_not_offered(place):
    script = printed("bash")
    for name, command in cli.COMMANDS.items():
        line = script.split(f"_shtab_lockstep_{name.replace(' ', '_')}_option_strings=(", 1)[1].split(")", 1)[0]
        actions = [action for action in actions_of(command.options()) if action.help != argparse.SUPPRESS]
        assert {option for action in actions for option in action.option_strings} == set(shlex.split(line)), name
    assert "--master-addr" not in script
    assert "<strategies>" not in printed("zsh")


def test_without_a_shell_it_says_which_there_are(capsys):
    assert cli.main(["completion"]) == 2
    assert "lockstep completion bash|zsh|tcsh" in capsys.readouterr().err
