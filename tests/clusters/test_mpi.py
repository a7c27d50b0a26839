"""A real Open MPI."""

import shutil

import pytest

pytestmark = [
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here"),
    pytest.mark.timeout(1200),
]


def mpirun(bench, *words):
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return bench.command("mpirun", "--oversubscribe", "-np", "2", "python", *words, **as_root)


def test_the_script_runs_as_it_is(bench, expected):
    done = mpirun(bench, "train.py")
    assert done.returncode == 0, done.stderr
    assert bench.result() == (expected(), 2)


def test_a_launcher_under_mpirun_says_what_is_wrong(bench):
    done = mpirun(bench, "-m", "lockstep", "run", "train.py")
    assert done.returncode == 2
    assert "(started by openmpi), and would start ranks of its own" in done.stderr
