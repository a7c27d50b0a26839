"""A real Grid Engine: the script that we write, what it sends us, and how a job starts again."""

import re
import shlex

import pytest

from lockstep.launch.schedulers.grid_engine import GridEngine
from lockstep.launch.schedulers.scheduler import Allocation, Node

SCRIPT = "job sge {place} --time {time} -o train.sh --save-every '2 steps' train.py"
#: What is asked for; two ranks each.
ONE_HOST = "--cpus 2 --pe lockstep --nproc-per-node 2"
TWO_HOSTS = "--nodes 2 --cpus 1 --pe spread --nproc-per-node 1"
#: Prints which start of its job this is.
STARTS = """\
import os
from lockstep.launch.schedulers import allocation
from lockstep.launch.schedulers.scheduler import text_of
found = allocation(os.environ, text_of)
print(found.restarted, found.start)
"""
everywhere = pytest.mark.parametrize("place", [ONE_HOST, TWO_HOSTS], ids=["one host", "two hosts"])

# Jobs of minutes, and a scheduler that lets them wait. Each wait has its own deadline, and says what it waited for.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def submit(engine, bench):
    """Submit a script; its job's number."""

    def give(*words, **env):
        variables = ",".join(f"{name}={value}" for name, value in {**bench.env, **env}.items())
        done = engine("qsub", "-terse", "-wd", str(bench.here), "-v", variables, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return give


@pytest.fixture
def gone(engine, bench):
    """Wait until a job has left the queue."""

    def wait(job):
        bench.until(lambda: "do not exist" in engine("qstat", "-j", job).stderr, f"the end of job {job}")

    return wait


@pytest.fixture
def written(bench):
    """Write a job script with a time limit."""

    def write(time, place=ONE_HOST):
        done = bench.command("python", "-m", "lockstep", *shlex.split(SCRIPT.format(time=time, place=place)))
        assert done.returncode == 0, done.stderr
        return str(bench.here / "train.sh")

    return write


@everywhere
def test_the_script_that_we_write_runs_as_it_is(engine, submit, gone, bench, expected, written, place):
    job = submit(written("10m", place))
    gone(job)
    assert ("(2 nodes: n" in bench.out()) == (place == TWO_HOSTS)
    assert bench.result() == (expected(), 2), bench.out()
    assert [path.name for path in (bench.here / "runs").iterdir()] == [f"train-job{job}"]


@everywhere
def test_a_deleted_job_saves_first_and_stays_deleted(engine, submit, gone, bench, expected, written, place):
    job = submit(written("10m", place), PAUSE="0.2", EPOCHS="12")
    bench.under_way()
    engine("qdel", job)
    gone(job)
    assert "stopped with a complete checkpoint" in bench.out()
    assert f"job {job} was deleted, so it does not start again" in bench.out()
    resume = f"-m lockstep run --nproc-per-node 3 --resume --run-dir runs/train-job{job} train.py"
    done = bench.command("python", *shlex.split(resume), EPOCHS="12", PAUSE="0")
    assert done.returncode == 0, done.stderr
    assert bench.result() == (expected(12), 3)


@everywhere
def test_a_job_whose_time_is_up_saves_starts_again_and_ends_in_the_same_bits(
    engine, submit, gone, bench, expected, written, place
):
    # Enough to have saved once, after which a run knows how long that takes, and stops a few seconds before its end.
    # There is more work than that, but for a run that goes on.
    job = submit(written("150s", place), PAUSE="4", EPOCHS="12")
    gone(job)
    if place == TWO_HOSTS:
        # On one the signal of the soft limit may come before.
        assert "stopped by the end of its job at " in bench.out()
        first, *_, last = re.findall(r"\(2 nodes: (n\d), (n\d)\)", bench.out())
        assert f"Grid Engine starts job {job} again for exit code 99, on others than {first[1]}" in bench.out()
        assert first[1] not in last
    assert f"Grid Engine starts job {job} again" in bench.out()
    assert "so its run goes on" in bench.out()
    assert bench.result() == (expected(12), 2), bench.out()
    assert [path.name for path in (bench.here / "runs").iterdir()] == [f"train-job{job}"]


@pytest.mark.parametrize("place", [(), ("-pe", "lockstep", "2")], ids=["one slot", "two slots"])
def test_each_start_of_a_job_is_told_from_the_others(submit, gone, bench, place):
    """Grid Engine says whether it has started a job before, and not how often."""
    (bench.here / "starts.py").write_text(STARTS)
    # It asks to be started again, twice.
    batch = bench.batch("PYTHON starts.py >> starts.out 2>&1", "[ $(wc -l < starts.out) -ge 3 ] || exit 99")
    gone(submit(*place, "-r", "y", batch))
    told = [line.partition(" ") for line in (bench.here / "starts.out").read_text().splitlines()]
    assert [restarted for restarted, _, _ in told] == ["False", "True", "True"]
    assert len({start for _, _, start in told if re.match(r"n\d .*\d:\d\d", start)}) == 3, told


def test_a_launcher_on_another_node_gets_the_words_as_they_are_meant(engine, submit, gone, bench):
    words = [
        "sh",
        "-c",
        'hostname > there; pwd >> there; printf "%s\\n" "$@" >> there',
        "run",
        "a b",
        "$HOME",
        "it's",
        '"',
        "*",
    ]
    given = Allocation(GridEngine(), "1", (Node("n1", 2), Node("n2", 2)))
    _, there = given.scheduler.start_commands(given, words, endpoint="h:1", directory=str(bench.here))
    batch = bench.batch(shlex.join(there.argv))
    place = "-pe spread 2 -masterq all.q@n1 -q all.q@n1,all.q@n2"
    gone(submit(*place.split(), "-o", "qrsh.out", "-j", "y", batch))
    said = (bench.here / "there").read_text().splitlines() if (bench.here / "there").exists() else bench.out()
    assert said == [
        "n2",
        str(bench.here),
        *shlex.split("--nnodes 2 --rdzv-endpoint h:1 --rdzv-id 1"),
        "a b",
        "$HOME",
        "it's",
        '"',
        "*",
    ]
