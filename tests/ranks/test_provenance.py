"""What a run is made of: the commit and the patch give the source that ran, and git never stops or delays a run."""

import os
import random
import shutil
import subprocess
import time

import pytest

from lockstep import provenance
from lockstep.provenance import settings_record, source_state
from lockstep.settings import OPTIONS_VARIABLE, ResolvedSettings
from waiting import wait_until

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(place, *words):
    command = ["git", "-C", place, "-c", "user.name=x", "-c", "user.email=x@x", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def repository(tmp_path):
    place = tmp_path / "source"
    (place / "deep").mkdir(parents=True)
    git(place, "init", "-q", "-b", "trunk")
    for name in ("train.py", "deep/model.py", "with blank.py", "weights.bin"):
        (place / name).write_bytes(b"".join(b"%s line %d\n" % (name.encode(), number) for number in range(9)))
    git(place, "add", ".")
    git(place, "commit", "-qm", "first")
    return place


def tracked(place):
    """The files that git tracks and that are there, with what they hold."""
    names = git(place, "ls-files", "-z").split("\0")
    return {name: (place / name).read_bytes() for name in names if name and (place / name).exists()}


@pytest.mark.parametrize("seed", range(8))
def test_the_commit_with_the_patch_is_the_source_that_ran(repository, run_dir, tmp_path, seed):
    chance = random.Random(seed)
    names = sorted(tracked(repository))
    for name in chance.sample(names, chance.randint(1, 3)):
        match chance.choice(["text", "bytes", "remove", "no newline"]):
            case "text":
                (repository / name).write_text("lr = 0.2\n")
            case "bytes":
                (repository / name).write_bytes(chance.randbytes(99))
            case "remove":
                (repository / name).unlink()
            case "no newline":
                (repository / name).write_bytes((repository / name).read_bytes() + b"\r\nlast")
    (repository / "new.py").write_text("new\n")
    if chance.random() < 0.5:
        git(repository, "add", "new.py")
    told = source_state(repository / "deep", run_dir)
    assert (told["branch"], told["dirty"], told["patch"]) == ("trunk", True, "source.patch")
    assert told["untracked"] == [name for name in ["../new.py"] if "new.py" not in tracked(repository)]
    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", repository, again)
    git(again, "checkout", "-q", told["commit"])
    git(again, "apply", "--index", run_dir / "source.patch")
    assert tracked(again) == tracked(repository)
    assert (run_dir / "source.patch").stat().st_mode & 0o777 == 0o600


def test_a_clean_tree_has_no_patch_and_a_detached_head_no_branch(repository, run_dir):
    git(repository, "checkout", "-q", "--detach")
    told = source_state(repository, run_dir)
    assert told == {
        "commit": git(repository, "rev-parse", "HEAD"), "branch": None, "dirty": False, "untracked": [], "patch": None,
    }  # fmt: skip
    assert list(run_dir.iterdir()) == []


def test_starts_with_the_same_changes_share_a_patch_and_others_get_their_own(repository, run_dir):
    patches = []
    for line in ("a", "b", "b", "a", "c"):
        (repository / "train.py").write_text(line)
        patches.append(source_state(repository, run_dir)["patch"])
    assert patches == ["source.patch", "source-2.patch", "source-2.patch", "source.patch", "source-3.patch"]


def test_changes_of_more_than_a_mebibyte_are_told_and_not_kept(repository, run_dir):
    (repository / "train.py").write_text("x" * (2 << 20))
    told = source_state(repository, run_dir)
    assert (told["dirty"], told["patch"]) == (True, "not kept: larger than 1.00 MiB")
    assert list(run_dir.iterdir()) == []


def test_a_patch_that_cannot_be_written_is_said_to_be_missing(repository, tmp_path):
    (repository / "train.py").write_text("x")
    assert source_state(repository, tmp_path / "gone")["patch"] == "not kept: No such file or directory"


def test_before_the_first_commit_there_is_none(tmp_path, run_dir):
    git(tmp_path, "init", "-q", "-b", "trunk")
    (tmp_path / "train.py").write_text("x")
    git(tmp_path, "add", "train.py")
    told = source_state(tmp_path, run_dir)
    assert (told["commit"], told["branch"], told["dirty"], told["patch"]) == (None, "trunk", True, None)


def test_without_a_repository_or_without_git_nothing_is_told(repository, tmp_path, run_dir, monkeypatch):
    assert source_state(tmp_path, run_dir) is None
    assert source_state(tmp_path / "gone", run_dir) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source_state(repository, run_dir) is None


@pytest.mark.parametrize("how", ["silent", "endless", "leaves a child"])
def test_a_git_that_does_not_end_is_ended_with_what_it_has_started(repository, run_dir, tmp_path, monkeypatch, how):
    """The fake prints for ever or nothing, or ends while a child holds its output open."""
    marks = tmp_path / "marks"
    body = {"silent": "sleep 600", "endless": "while :; do echo '# branch.oid x'; done", "leaves a child": ""}[how]
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "git").write_text(f"#!/bin/sh\nsleep 600 &\necho $! >> {marks}\necho $$ >> {marks}\n{body}\n")
    (tools / "git").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(provenance, "_GIT_S", 1.0)
    began = time.monotonic()
    told = source_state(repository, run_dir)
    assert time.monotonic() - began < 60
    assert told is None or told["dirty"] is False
    pids = [int(line) for line in marks.read_text().split()]
    wait_until(lambda: not any(map(runs, pids)))


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_each_setting_has_its_value_and_source_and_no_secret():
    env = {"LOCKSTEP_KEEP": "4", OPTIONS_VARIABLE: '{"checkpoint": "https://me:hunter2@host/r"}'}
    record = settings_record(ResolvedSettings.resolve({"seed": 7}, env))
    assert record["seed"] == {"value": 7, "source": "script"}
    assert record["keep"] == {"value": 4, "source": "environment"}
    assert record["strategy"] == {"value": "ddp", "source": "default"}
    assert record["checkpoint"]["source"] == "command line"
    assert "hunter2" not in str(record)
