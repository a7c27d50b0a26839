"""Faults on purpose: read as they are written, done where they are said to be, once, and seen to be done."""

import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import SettingError
from lockstep.faults import Fault, PlannedFault
from lockstep.heartbeat import ProgressMarker
from lockstep.heartbeat_message import PHASES
from lockstep.testing import FaultPlan, run_each

whole = st.integers(0, 10**6)
moments = st.one_of(
    st.builds(dict, step=whole),
    st.builds(dict, phase=st.sampled_from(PHASES)),
    st.builds(dict, phase=st.sampled_from(PHASES), step=whole),
)
seconds = st.integers(1, 10**5).map(lambda tenths: tenths / 10)
places = st.one_of(
    st.builds(dict, kind=st.sampled_from(["kill", "stop", "raise", "loop"]), rank=whole),
    st.builds(dict, kind=st.just("delay"), rank=whole, seconds=seconds),
    st.builds(dict, kind=st.just("fill")),
    st.builds(dict, kind=st.just("cut"), node=whole),
)
late = st.builds(dict, kind=st.sampled_from(["kill", "stop", "raise"]), rank=whole, after_s=seconds)
faults = st.one_of(
    st.builds(lambda place, moment: Fault(**place, **moment), places, moments), late.map(lambda said: Fault(**said))
)


@given(st.lists(faults, max_size=4))
def test_a_plan_is_read_as_it_is_written(planned):
    plan = FaultPlan(tuple(planned))
    assert FaultPlan.parse(str(plan)) == plan
    assert FaultPlan.parse(str(plan).replace("; ", "\n").replace(" ", "  ")) == plan


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill rank 1", "say when"),
        ("kill rank one at step 3", "such as 'kill rank 1 at step 7'"),
        ("stop rank 1 in backwards", "one of the phases"),
        ("kill rank 1 at step 3 after 2 s", "either"),
        ("loop in rank 1 after 2 s", "give a step"),
        ("explode at step 3", "say what, where and when"),
    ],
)
def test_what_is_no_fault_is_refused_with_what_is_one(text, says):
    with pytest.raises(SettingError, match=says):
        FaultPlan.parse(text)


def test_a_world_that_cannot_have_it_is_told():
    with pytest.raises(SettingError, match="ranks are 0 to 1"):
        FaultPlan.parse("kill rank 2 at step 1").check(ranks=2, nodes=1)
    with pytest.raises(SettingError, match="nodes are 0 to 0"):
        FaultPlan.parse("cut the network of node 1 at step 1").check(ranks=2, nodes=1)
    FaultPlan.parse("kill rank 1 at step 1; cut the network of node 0 at step 1").check(ranks=2, nodes=1)


def moves(marker, steps):
    """Where a fault of a rank that goes through ``steps`` steps comes, if one does."""
    for step in range(steps + 1):
        for move in (
            lambda step=step: marker.set_step(step),
            *(lambda p=p: marker.set_phase(p) for p in ("forward", "backward", "reduction")),
        ):
            try:
                move()
            except PlannedFault:
                return marker.step, marker.phase
    return None


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("raise in rank 1 at step 2", (2, "reduction")),
        ("raise in rank 1 in backward", (0, "backward")),
        ("raise in rank 1 in backward at step 3", (3, "backward")),
        ("raise in rank 1 in reduction at step 1", (1, "reduction")),
        ("raise in rank 1 in save", None),
        ("raise in rank 0 at step 1", None),
    ],
)
def test_it_happens_where_it_was_said_and_once(tmp_path, text, where):
    plan, notes = FaultPlan.parse(text), tmp_path / "faults.txt"
    marker = ProgressMarker()
    plan.arm(notes, rank=1, of=marker)
    assert moves(marker, 5) == where
    assert moves(marker, 5) is None
    assert bool(plan.missed(notes)) == (where is None)
    if where is None:
        with pytest.raises(AssertionError, match=f"never happened: {text}"):
            plan.assert_happened(notes)
    else:
        plan.assert_happened(notes)
        again = ProgressMarker()
        plan.arm(notes, rank=1, of=again)
        assert moves(again, 5) is None, "a later generation must get past it"


def struck(text, directory, seconds):
    from lockstep.heartbeat import progress_marker

    rank = int(os.environ["RANK"])
    FaultPlan.parse(text).arm(Path(directory, "faults.txt"), rank=rank)
    began = time.monotonic()
    for step in range(6):
        progress_marker().set_step(step)
    while time.monotonic() < began + seconds:
        time.sleep(0.01)
    return time.monotonic() - began


def how(outcome):
    return type(outcome.error).__name__, str(outcome.error)


def test_kills_stops_delays_and_raises_are_real(tmp_path):
    text = "kill rank 0 at step 3; delay rank 1 by 0.3 s at step 2; raise in rank 2 after 0.2 s"
    outcomes = run_each(struck, 3, text, str(tmp_path), 0.1)
    assert how(outcomes[0]) == ("ChildProcessError", "rank 0 was killed by SIGKILL before the function returned")
    assert outcomes[1].value >= 0.3
    assert outcomes[2].value is not None, "it was through before"
    assert FaultPlan.parse(text).missed(tmp_path / "faults.txt") == (Fault.parse("raise in rank 2 after 0.2 s"),)
    (late,) = run_each(struck, 1, "raise in rank 0 after 0.1 s", str(tmp_path), 60)
    assert how(late)[0] == "PlannedFault"


def stopped(directory):
    # A stopped process can say nothing, so its parent looks.
    child = os.fork()
    if child == 0:
        struck("stop rank 0 at step 1", directory, 0)
        os._exit(0)
    _, status = os.waitpid(child, os.WUNTRACED)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return os.WIFSTOPPED(status) and os.WSTOPSIG(status)


def test_a_stop_is_a_stop(tmp_path):
    (outcome,) = run_each(stopped, 1, str(tmp_path))
    assert outcome.value == signal.SIGSTOP, outcome


def test_what_would_hurt_others_is_refused_with_what_it_needs(tmp_path, monkeypatch):
    import shutil

    free = shutil._ntuple_diskusage(1 << 50, 0, 1 << 50)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(SettingError, match="on a small one"):
        FaultPlan.parse("fill the disk at step 1").arm(tmp_path / "faults.txt", rank=0, of=ProgressMarker())
    with pytest.raises(SettingError, match="ip netns exec"):
        FaultPlan.parse("cut the network of node 0 at step 1").arm(tmp_path / "faults.txt", rank=0, of=ProgressMarker())
    FaultPlan.parse("fill the disk at step 1").arm(tmp_path / "faults.txt", rank=1, of=ProgressMarker())
