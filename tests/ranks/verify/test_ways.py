"""Which ways there are, and which lines of a script are to blame: pure functions of what was seen."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch import Script
from lockstep.transcript import MICRO_BATCH, STATE, Place
from lockstep.verify.difference import Difference
from lockstep.verify.reason import Evidence, reason_of
from lockstep.verify.script_source import ScriptSource
from lockstep.verify.surroundings import reads_in
from lockstep.verify.way import RunPlan, Way, resumes_and_strategies, worlds_and_surroundings


@given(st.integers(1, 40), st.integers(1, 9), st.integers(6, 24), st.booleans())
def test_ways_fit_the_script(micro_batches, micro_batch, steps, worlds_differ):
    plan = RunPlan(micro_batches, micro_batch, steps, 4)
    worlds = worlds_and_surroundings(plan)
    others = resumes_and_strategies(plan, ("zero",), worlds_differ=worlds_differ)
    for way in (*worlds, *others):
        assert max(way.ranks, way.resumed_on) <= micro_batches
        assert way.killed_after is None or 0 < way.killed_after <= steps - 2  # a step more, and the kill
        assert all(len(part.shifted) < 2 and not part.parts for part in way.parts)
    assert {way.workers for way in worlds} == {0, 1, 2}
    if micro_batches > 2:
        assert any(micro_batches % way.ranks for way in worlds) or micro_batches % 12 == 0
    smaller = [way.micro_batch for way in others if way.varies == "micro-batch"]
    assert smaller == ([micro_batch // 2] if micro_batch > 1 else [])
    killed = [way.killed_after for way in others if way.varies == "resume"]
    assert len({step % 4 == 0 for step in killed}) == 2  # within a pass, and at its end
    assert len({str(way) for way in (*worlds, *others)}) == len(worlds) + len(others)


SOURCE = """\
import time
class Data:
    def __init__(self):
        self.rng = Generator()
    def __getitem__(self, i):
        return self.rng.draw()
def weight(scale):
    return scale * FACTOR
with Run() as run:
    count = 0
    rate = 0.1 * run.world_size
    print(run.rank)
    batches = run.loader(Data(), global_batch=4)
    for epoch in run.epochs(3):
        for x in run.train(batches):
            count += 1
            y = x + 1
            history.append(y)
            run.step(weight(count) * y)
        for name in {"a", "b"}:
            pass
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "train.py").write_text(SOURCE)
    return ScriptSource.of(Script(str(tmp_path / "train.py")))


def test_the_source_says_what_bodies_read_and_what_their_losses_need(source):
    dead, needed = source.read_by_body()
    assert dead == {"x", "y"}
    assert {"count", "weight", "FACTOR", "batches"} <= needed
    assert "history" not in needed
    assert source.set_at("count").number == 16
    assert source.set_at("data.rng").number == 4
    assert [line.number for line in source.rank_reads()] == [11]
    assert [line.number for line in source.hash_orders()] == [20]
    assert [line.number for line in source.unseeded_generators()] == [4]


def reason(source, way, what, place=None, **more):
    place = place or Place.of(MICRO_BATCH, 1, 1)
    found = reason_of(Evidence(way, Difference(place, what), **more), source)
    return found.line.number if found.line else None


def test_the_likely_line(source):
    two = Way("ranks", ranks=2)
    assert reason(source, two, "the loss", variables={"history": ("", ""), "count": ("2", "0")}) == 16
    assert reason(source, two, "sample 1", variables={"count": ("2", "0"), "batches.rng": ("", "")}) == 4
    assert reason(source, two, "state.optimizers.0.param_groups.0.lr", Place.of(STATE, 0)) == 11
    assert reason(source, two, "sample 1") == 11
    assert reason(source, Way("workers", workers=1), "sample 1") == 5
    assert reason(source, Way("again"), "the loss") == 4
    assert reason(source, Way("surroundings", shifted=("hash seed",)), "the loss") == 20
    read = [("clock", next(iter(source.lines)), 12), ("clock", next(iter(source.lines)), 11)]
    assert reason(source, Way("surroundings", shifted=("clock",)), "the loss", reads=read) == 11  # not the print
    assert reason(source, Way("resume", killed_after=2), "the loss") == 19  # nothing is known but where


WATCHED = """\
import datetime, os, random, socket, sys, time
from lockstep.verify.surroundings import Surroundings
plain = time.time(), sorted(os.listdir("/usr")), socket.gethostname()
Surroundings(sys.argv[1], sys.argv[2].split(",")).watch()
exec(compile('''
random.seed(3)
random.seed()
now, names, host = time.time(), os.listdir("/usr"), socket.gethostname()
date = datetime.datetime.now()
''', "/home/user/train.py", "exec"))
assert isinstance(date, datetime.datetime) and isinstance(datetime.datetime(2024, 1, 1), datetime.date)
print(now - plain[0] > 1e6, names == os.listdir("/usr"), host == plain[2], date.timestamp() - plain[0] > 1e6)
"""


@pytest.mark.parametrize("shifted", ["clock,host,order", "nothing"])
def test_surroundings_are_shifted_for_lines_of_the_script_and_noted(tmp_path, shifted):
    notes = tmp_path / "notes"
    notes.touch()
    kinds = shifted.replace("order", "listing")
    done = subprocess.run([sys.executable, "-c", WATCHED, notes, kinds], capture_output=True, text=True, timeout=100)
    moved = shifted != "nothing"
    assert done.stdout.split() == [str(moved), "False" if moved else "True", str(not moved), str(moved)], done.stderr
    reads = [(kind, line) for kind, file, line in reads_in(notes.read_text()) if file.endswith("train.py")]
    assert sorted(reads) == [("chance", 3), ("clock", 4), ("clock", 5), ("host", 4), ("listing", 4)]
