"""That `conftest.py` does what the marks say: in a suite of their own, on two workers of which one crashes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NOTE = """
import os
import pytest

@pytest.fixture(autouse=True)
def note(request):
    with open(os.environ["NOTES"], "a") as notes:
        print(os.environ.get("PYTEST_XDIST_WORKER"), request.node.nodeid, file=notes)
"""
TOGETHER = """
pytestmark = pytest.mark.together

@pytest.mark.parametrize("number", range(9))
def test_one(number): ...
"""
BY = """
@pytest.mark.together(by="word")
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("word", ["a", "b", "c"])
def test_by(word, number): ...

LATER = pytest.param(2, marks=pytest.mark.campaign)
FIRST = pytest.param(3, marks=[pytest.mark.campaign, pytest.mark.long])

@pytest.mark.parametrize("size", [1, LATER, FIRST])
def test_size(size): ...
"""
CRASH = """
from pathlib import Path

def test_crash():
    if not Path("crashed").exists():
        Path("crashed").touch()
        os._exit(1)
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Where it lies; it writes to `notes` which worker runs which test."""
    for name, text in {"together": TOGETHER, "by": BY, "crash": CRASH}.items():
        (tmp_path / f"test_{name}.py").write_text(NOTE + text)
    for file in ("tests/conftest.py", "tests/harness/campaign_marks.py", "tests/harness/waiting.py", "pyproject.toml"):
        shutil.copy(Path(__file__).parents[2] / file, tmp_path)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    for name in [name for name in os.environ if name.startswith(("PYTEST_", "LOCKSTEP_CAMPAIGN"))]:
        monkeypatch.delenv(name)
    return tmp_path


def ran(suite, *options, **env):
    """What the run of the suite shows, and (worker, test) for each test that began."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider", *options, "."],
        cwd=suite,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    notes = [line.split(" ", 1) for line in (suite / "notes").read_text().splitlines()]
    return done.stdout + done.stderr, [(worker, test.partition("::")[2]) for worker, test in notes]


def test_what_belongs_together_is_run_by_one_worker_though_another_crashes(suite):
    shown, notes = ran(suite, "-n", "2")
    assert "1 failed, 26 passed" in shown, shown
    assert "crashed while running 'test_crash.py::test_crash'" in shown
    for scope in ("test_one[", "test_by[a-", "test_by[b-", "test_by[c-"):
        assert len({worker for worker, name in notes if name.startswith(scope)}) == 1, notes
    assert {name for _, name in notes if name.startswith("test_size")} == {"test_size[1]"}


def test_what_is_the_campaigns_runs_there_and_what_is_long_begins_first(suite):
    shown, notes = ran(suite, LOCKSTEP_CAMPAIGN="1")
    assert "2 passed" in shown, shown
    assert [name for _, name in notes] == ["test_size[3]", "test_size[2]"]
