"""That the benchmarks run, not what they measure: in the smallest size each."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def measured(tmp_path, script, *options):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options, "--rounds", "1", "--json", str(tmp_path / "found.json")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "found.json").read_text()), done.stdout


def test_loop(tmp_path):
    (found,), shown = measured(tmp_path, "loop.py", "--ranks", "2", "--models", "linear")
    assert {"by hand", "lockstep", "lockstep, data in memory"} <= found["loops"].keys()
    assert found["loops"]["by hand"]["ratio"] == 1
    assert "linear, 2 ranks" in shown


def test_exact(tmp_path):
    found, shown = measured(tmp_path, "exact.py", "--ranks", "2", "--millions", "0.01", "--micro", "1", "2")
    assert [row["micro"] for row in found] == [1, 2]
    assert all(row[f"{way}_ms"] > 0 for row in found for way in ("ddp", "exact", "fast"))
    assert len(shown.splitlines()) == 4


def test_start(tmp_path):
    found, shown = measured(tmp_path, "start.py", "--ranks", "2")
    assert all(seconds > 0 for way in found["2"].values() for seconds in way)
    assert len(shown.splitlines()) == 3


def test_failures():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "failures.py"), "--only", "exception in forward"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = done.stdout.splitlines()
    failure, phase, said, _, left, at, bits, code = row.split(" | ")
    assert (failure, phase, left, at, bits, code) == ("exception", "forward", "0", "step 10", "equal", "0")
    assert said == "rank 1 of 2 raised lockstep.watch.faults.PlannedFault"
