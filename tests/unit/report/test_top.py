"""A run seen from another terminal."""

import fcntl
import io
import os
import pty
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import SettingError
from lockstep.memory_use import MemoryUse
from lockstep.report import RanksFile, RankStatus, Status, StatusFile, lateness, top
from lockstep.report.top import ended, table

ranks = st.lists(
    st.builds(
        RankStatus,
        rank=st.integers(0, 63),
        step=st.integers(-1, 10**6),
        phase=st.sampled_from(["forward", "reduction"]),
        place=st.text(max_size=10),
        waits=st.none() | st.floats(0, 1),
        silent_s=st.floats(0, 1000),
        memory=st.builds(MemoryUse, st.none() | st.integers(0, 1 << 50), st.none() | st.integers(0, 1 << 50)),
    ),
    unique_by=lambda one: one.rank,
    max_size=12,
)


def row(rank, waits, **more):
    return RankStatus(rank, 7, "forward", f"train.py:{rank}", waits, **more)


@given(st.lists(ranks, min_size=1, max_size=3))
def test_all_nodes_ranks_come_back_by_rank(tmp_path_factory, nodes):
    run_dir = tmp_path_factory.mktemp("run")
    for number, held in enumerate(nodes):
        RanksFile(run_dir, number).write(held)
    last = {one.rank: one for held in nodes for one in held}
    assert RanksFile.read_all(run_dir) == [last[rank] for rank in sorted(last)]
    assert not list(run_dir.glob(".*")), "no scratch is left"


def test_what_cannot_be_read_is_left_out(tmp_path):
    RanksFile(tmp_path, 0).write([row(0, 0.5)])
    for number, text in enumerate(("", "[1]", '[{"rank": 1}]'), start=1):
        (tmp_path / f"ranks-000{number}.json").write_text(text)
    assert [one.rank for one in RanksFile.read_all(tmp_path)] == [0]


@pytest.mark.parametrize(
    ("waits", "says"),
    [
        ([0.4, 0.38, 0.02, 0.37], "3 ranks wait 38 % for rank 2"),
        ([0.0, 0.6], "1 rank waits 60 % for rank 0"),
        ([0.3, 0.32, 0.29], ""),
        ([None, 0.9], ""),
        ([], ""),
    ],
)
def test_who_keeps_the_others_waiting(waits, says):
    assert lateness([row(rank, part) for rank, part in enumerate(waits)]) == says


def test_the_margin_to_the_end_of_the_job():
    words = Status(step=1, eta_s=600.0, job_left_s=4200.0, late="1 rank waits 60 % for rank 0").words()
    assert words["job"] == "job leaves 1 h 10 m, 1 h 00 m spare"
    assert words["late"] == "1 rank waits 60 % for rank 0"
    assert Status(step=1, eta_s=4200.0, job_left_s=600.0).words()["job"] == "job leaves 10 m 00 s, 1 h 00 m short"
    assert Status(step=1, job_left_s=600.0).words()["job"] == "job leaves 10 m 00 s"
    assert "job" not in Status(step=1, job_left_s=600.0, state="done").words()


def test_many_ranks_are_cut_to_those_that_are_waited_for():
    lines = table([row(rank, 0.0 if rank == 70 else 0.5) for rank in range(80)])
    assert lines[-1] == "... and 48 ranks more, which wait longer"
    assert any(line.split()[0] == "70" for line in lines)
    assert table([]) == []


def test_memory_has_columns_where_it_is_known():
    held = [MemoryUse(3 << 29, 2 << 30, 5 << 30), MemoryUse(1 << 20, None, 5 << 30, 1 << 30, 3 << 30, 9 << 30)]
    head, *lines = table([row(rank, 0.5, memory=memory) for rank, memory in enumerate(held)])
    assert head.split()[-9:] == ["memory", "peak", "free", "GPU", "GPU", "peak", "GPU", "free", "place"]
    assert "1.50 GiB" in lines[0]
    assert lines[0].split().count("-") == 3
    assert "9.00 GiB" in lines[1]
    assert "memory" not in table([row(0, 0.5)])[0]
    head, line = table([row(3, None, silent_s=61.0)])
    assert head.split() == ["rank", "step", "phase", "waits", "heard", "place"]
    assert line.split() == ["3", "7", "forward", "-", "1", "m", "01", "s", "ago", "train.py:3"]


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    StatusFile(tmp_path / "status.json").write(Status(step=12, samples_per_s=100.0, world_size=2))
    RanksFile(tmp_path, 0).write([row(0, 0.5), row(1, 0.0)])
    return tmp_path


@pytest.fixture
def working(run_dir):
    """As its launcher holds it."""
    lock = (run_dir / ".lock").open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)
    with lock:
        yield lock


def test_once_shows_the_status_and_each_rank_and_leaves(run_dir, working):
    out = io.StringIO()
    top(run_dir, out, {}, once=True)
    first, head, *rows = out.getvalue().splitlines()
    assert first == "step 12 | epoch 1 | 100 samples/s | 1 rank waits 50 % for rank 1"
    assert head.split()[0] == "rank"
    assert len(rows) == 2
    working.close()
    top(run_dir, out, {}, once=True)
    assert out.getvalue().splitlines()[-1] == "the run has ended"


def test_it_follows_the_run_to_its_end(run_dir, working):
    out, looks = io.StringIO(), []

    def sleep(seconds):
        looks.append(seconds)
        assert not ended(run_dir)
        if len(looks) == 3:
            StatusFile(run_dir / "status.json").write(Status(step=13, state="done"))
            working.close()

    top(run_dir, out, {}, once=False, sleep=sleep)
    assert len(looks) == 3
    assert out.getvalue().splitlines()[-2:] == ["done | step 13 | epoch 1", "the run has ended"]


def test_on_a_terminal_it_is_one_live_screen(run_dir, working):
    ours, theirs = pty.openpty()
    drawn = []
    reader = threading.Thread(target=lambda: drawn.extend(iter(lambda: _read(ours), b"")), daemon=True)
    reader.start()
    with os.fdopen(theirs, "w") as stream:
        env = {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "100", "LINES": "30"}
        top(run_dir, stream, env, once=False, sleep=lambda seconds: working.close())
    reader.join(10)
    os.close(ours)
    shown = b"".join(drawn).decode()
    assert "step 12" in shown
    assert "train.py:1" in shown
    assert shown.rstrip().endswith("the run has ended")
    assert "\x1b[3" not in shown, "NO_COLOR"


def _read(descriptor):
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""


def test_what_is_no_run_is_refused_with_the_newest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match="is no run directory"):
        top(tmp_path / "x", io.StringIO(), {}, once=True)
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/run.json").touch()
    with pytest.raises(SettingError, match="the newest is runs/a"):
        top(tmp_path / "x", io.StringIO(), {}, once=True)
