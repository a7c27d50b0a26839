"""`lockstep tune` on a search that is there: `--show`, `--json`, `--pictures`, `--to-optuna`, `--from-optuna`."""

import json
import os
import subprocess
import sys

import pytest

from lockstep.cli import main
from simulated_search import simulated_search, write


@pytest.fixture
def search(tmp_path):
    return write(simulated_search(trials=20), tmp_path / "search")


def test_show_says_it_in_words_and_as_json(search, capsys):
    assert main(["tune", "--show", str(search)]) == 0
    words = capsys.readouterr().out
    assert words.startswith("20 of 20 trials: ")
    assert main(["tune", "--show", "--json", "--top", "2", str(search)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert f"best: trial {told['best']['number']}, " in words
    assert len(told["trials"]) == 20
    assert {len(top) for top in told["top"].values()} == {2}


def test_a_search_goes_to_optuna_and_comes_back(search, tmp_path, capsys):
    study = str(tmp_path / "study.log")
    assert main(["tune", "--to-optuna", study, str(search)]) == 0
    assert main(["tune", "--from-optuna", study, "--show", str(tmp_path / "again")]) == 0
    said = capsys.readouterr()
    assert "study search is in" in said.err
    assert "20 trials of" in said.err
    assert said.out.startswith("20 of 20 trials: ")


def test_a_reader_that_has_seen_enough_is_no_error(search):
    """Such as ``lockstep tune --show RUN | head -1``."""
    command = [sys.executable, "-m", "lockstep", "tune", "--show", str(search)]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--show"], "give the directory of a search"),
        (["--show", "nowhere"], "holds no search"),
        (["--show", "--top", "0", "nowhere"], "give at least 1"),
    ],
)
def test_what_cannot_be_shown_is_a_usage_error(words, says, capsys):
    assert main(["tune", *words]) == 2
    assert says in capsys.readouterr().err
