"""That `conftest.py` sees what a test leaves behind: planted leaks, in a suite of their own."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

PLANTED = """
import os, random, subprocess, sys, threading
from pathlib import Path
import torch

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
LEFT = []

def test_1_thread():
    threading.Thread(target=threading.Event().wait, daemon=True, name="left-thread").start()

def test_2_child():
    LEFT.append(subprocess.Popen(SLEEP))

def test_3_orphan():
    subprocess.run([sys.executable, "-c", f"import subprocess; subprocess.Popen({SLEEP!r})"], check=True)

def test_4_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

def test_5_changes():
    os.environ["CHANGED"] = "1"
    os.environ.pop("OMP_NUM_THREADS")
    os.chdir("/")
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    random.seed(5)
    Path(os.environ["DRAWN"]).write_text(f"{torch.rand(())} {random.random()}")

def test_6_are_undone():
    assert "CHANGED" not in os.environ
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.getcwd() != "/"
    assert torch.get_num_threads() == 1
    assert torch.get_default_dtype() == torch.float32
    assert not torch.distributed.is_initialized()
    torch_drawn, python_drawn = Path(os.environ["DRAWN"]).read_text().split()
    assert f"{torch.rand((), dtype=torch.float64)}" != torch_drawn
    assert str(random.random()) != python_drawn

def test_7_ended_in_time():
    thread = threading.Thread(target=threading.Event().wait, args=(0.1,))
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
"""


@pytest.mark.long
def test_what_is_left_behind_fails_its_test_and_only_that(tmp_path, monkeypatch):
    conftest = (TESTS / "conftest.py").read_text()
    assert "GRACE_S = 10.0" in conftest
    (tmp_path / "conftest.py").write_text(conftest.replace("GRACE_S = 10.0", "GRACE_S = 0.5"))
    (tmp_path / "test_planted.py").write_text(PLANTED)
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    for module in ("campaign_marks.py", "waiting.py"):
        shutil.copy(TESTS / "harness" / module, tmp_path)
    monkeypatch.setenv("DRAWN", str(tmp_path / "drawn"))
    monkeypatch.setenv("RANK", "3")  # as inside a job, of which the suite is no rank
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider", "-rEfp", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    shown = done.stdout
    assert "7 passed, 4 errors" in shown, shown + done.stderr
    assert "left behind: thread left-thread" in shown
    assert len(re.findall(r"(?m)^left behind: process", shown)) == 2
    assert "left behind: the default process group" in shown
    for name in ("test_1_thread", "test_2_child", "test_3_orphan", "test_4_group"):
        assert f"ERROR test_planted.py::{name}" in shown
