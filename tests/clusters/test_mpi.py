"""A real Open MPI."""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here")


def mpirun(bench, *words):
    env = {**os.environ, **bench.env, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = ["mpirun", "--oversubscribe", "-np", "2", sys.executable, *words]
    return subprocess.run(words, cwd=bench.here, env=env, capture_output=True, text=True, timeout=120)


def test_the_script_runs_as_it_is(bench, expected):
    done = mpirun(bench, "train.py")
    assert done.returncode == 0, done.stderr
    assert bench.result() == (expected(), 2)


def test_a_launcher_under_mpirun_says_what_is_wrong(bench):
    done = mpirun(bench, "-m", "lockstep", "run", "train.py")
    assert done.returncode == 2
    assert "(started by openmpi), and would start ranks of its own" in done.stderr
