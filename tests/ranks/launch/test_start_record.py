"""What `run.json` says of a start: with the launcher and without, whatever git and the directory are like."""

import json
import os
import shutil
import socket
import subprocess

import pytest

from lockstep.html_report import read_run

OPENS = """
import os
import lockstep
with lockstep.Run(seed=7, checkpoint=os.environ.get("KEEP_IN")) as run:
    print("opened on", run.world_size)
"""
LAUNCHED = ("-m", "lockstep", "run")


def starts_in(directory):
    return json.loads((directory / "run.json").read_text())["starts"]


def sources_of(start):
    return {name: (one["value"], one["source"]) for name, one in start["settings"].items()}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("launched", [True, False])
def test_a_start_is_recorded_with_its_settings_and_their_sources_its_commit_and_its_node(workshop, launched):
    script = workshop.script(OPENS)
    for words in (("init", "-q"), ("add", script), ("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x")):
        subprocess.run(["git", *words], cwd=workshop.here, check=True)
    workshop.script(f"{OPENS}# changed\n")
    workshop.script("[run]\nkeep = 5\n", "lockstep.toml")
    env = {"LOCKSTEP_CHECK_EVERY": "100", "PRIVATE_WORD": "hunter2"} | ({} if launched else {"KEEP_IN": "r"})
    options = ("--run-dir", "r", "--nproc-per-node", 2, "--set", "clip_norm=1", script, "--token", "hunter2")
    words = options if launched else (script, "--token", "hunter2")
    for again in (False, True):
        more = ("--resume",) if again and launched else ()
        ended = workshop.end_of(workshop.start(*more, *words, command=LAUNCHED if launched else (), **env))
        assert ended.code == 0, ended.err
    assert "hunter2" not in (workshop.here / "r" / "run.json").read_text()
    for start in (starts := starts_in(workshop.here / "r")):
        assert start["command"].endswith("train.py --token '***'")
        assert start["ranks"] == (2 if launched else 1)
        sources = sources_of(start)
        assert sources["seed"] == (7, "script")
        assert sources["keep"] == (5, "lockstep.toml:2")
        assert sources["check_every"] == (100, "environment")
        assert sources["clip_norm"] == ((1.0, "command line") if launched else (None, "default"))
        assert sources["strategy"] == ("ddp", "default")
        assert start["source"]["dirty"]
        assert "lockstep.toml" in start["source"]["untracked"]
        assert start["source"]["patch"] == "source.patch"
        assert start["nodes"].keys() == {socket.gethostname()}
        assert start["nodes"][socket.gethostname()]["cpus"] == os.cpu_count()
        assert start["versions"].keys() == {"lockstep", "python", "torch", "numpy", "platform"}
    assert len(starts) == 2
    assert "+# changed" in (workshop.here / "r" / "source.patch").read_text()
    assert read_run(workshop.here / "r").patches.keys() == {"source.patch"}


def test_what_the_launcher_knows_of_settings_is_there_for_a_program_that_opens_no_run(workshop):
    script = workshop.script("print('no run')")
    ended = workshop.run("--run-dir", "r", "--set", "keep=4", script, LOCKSTEP_SEED="3")
    assert ended.code == 0, ended.err
    sources = sources_of(starts_in(workshop.here / "r")[0])
    assert (sources["keep"], sources["seed"]) == ((4, "command line"), (3, "environment"))


def test_without_a_launcher_and_without_checkpoints_nothing_is_written(workshop):
    ended = workshop.end_of(workshop.start(workshop.script(OPENS), command=()))
    assert ended.code == 0, ended.err
    assert [path.name for path in workshop.here.iterdir()] == ["train.py"]


@pytest.mark.campaign
@pytest.mark.parametrize("launched", [True, False])
def test_a_git_that_does_not_answer_is_as_none(workshop, launched):
    workshop.script("#!/bin/sh\nsleep 600\n", "git")
    (workshop.here / "git").chmod(0o700)
    env = {"PATH": f"{workshop.here}:{os.environ['PATH']}"} | ({} if launched else {"KEEP_IN": "r"})
    words = ("--run-dir", "r", workshop.script(OPENS)) if launched else (workshop.script(OPENS),)
    ended = workshop.end_of(workshop.start(*words, command=LAUNCHED if launched else (), **env))
    assert (ended.code, ended.out.strip()) == (0, "opened on 1"), ended.err
    (start,) = starts_in(workshop.here / "r")
    assert start["source"] is None
    assert start["settings"]["seed"] == {"value": 7, "source": "script"}


@pytest.mark.campaign
@pytest.mark.parametrize("damage", ["starts", "nodes", "all"])
def test_a_record_that_somebody_has_damaged_stops_no_run(workshop, damage):
    """The script does so itself, before it opens its run."""
    text = {"starts": '{"starts": [], "generations": []}', "nodes": '{"starts": [{"nodes": 3}], "generations": []}'}
    script = workshop.script(f"""
from pathlib import Path
Path("r/run.json").write_text({text.get(damage, "{")!r})
{OPENS}""")
    ended = workshop.run("--run-dir", "r", script)
    assert (ended.code, ended.out.strip()) == (0, "opened on 1"), ended.err


def test_a_record_that_cannot_be_written_stops_no_run(workshop):
    (workshop.here / "r" / "run.json").mkdir(parents=True)
    ended = workshop.end_of(workshop.start(workshop.script(OPENS), command=(), KEEP_IN="r"))
    assert (ended.code, ended.out.strip()) == (0, "opened on 1"), ended.err
