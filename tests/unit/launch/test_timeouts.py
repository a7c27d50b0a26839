"""Laws of the times that launchers wait: how one follows from another, and what ends a silence."""

from dataclasses import fields
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lockstep.heartbeat import BEAT_EVERY_S
from lockstep.launch import timeouts
from lockstep.launch.diagnosis.hang_analysis import HangTimeouts
from lockstep.launch.job.request import NodeOptions, Nodes, Request
from lockstep.launch.timeouts import NodeTimeouts, Silence

SECONDS = st.floats(0.01, 1e5)


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 100)), min_size=1), st.floats(0, 100))
def test_a_silence_lasts_since_something_else_was_said(heard, then_s):
    silence, now_s, since_s, last = Silence(-1, 0.0), 0.0, 0.0, -1
    for said, pause_s in heard:
        now_s += pause_s
        silence = silence.after(said, now_s)
        since_s, last = (since_s, last) if said == last else (now_s, said)
        assert (silence.said, silence.for_s(now_s)) == (last, now_s - since_s)
    assert silence.for_s(now_s + then_s) == now_s + then_s - since_s
    assert silence.for_s(since_s - 1.0) == 0.0, "a clock that is read earlier by another thread"
    assert silence.restarted(now_s) == Silence(last, now_s)


@given(SECONDS)
def test_a_node_ends_its_ranks_in_time_whatever_the_user_gives(lost_after_s):
    times = NodeTimeouts(lost_after_s)
    # A lease that is renewed so often lives through a file system that does not answer twice.
    assert 3 * times.every_s < lost_after_s
    order = (0.0, times.suspect_after_s, times.leave_after_s, lost_after_s, 2 * lost_after_s, times.over_after_s)
    assert all(earlier < later for earlier, later in pairwise(order)), order
    nodes = Nodes.of("2", "n1", None, NodeOptions(f"lost_after={lost_after_s!r}"))
    assert (nodes.lost_after_s, nodes.suspect_after_s) == (lost_after_s, times.suspect_after_s)
    assert lost_after_s - times.leave_after_s <= timeouts.PEER_LOST_GRACE_S, "ranks are killed after so long anyway"


def test_who_is_waited_for_is_given_up_only_after_what_it_may_need():
    beats = (BEAT_EVERY_S, timeouts.ABSENT_S, timeouts.SILENT_S, HangTimeouts().floor_s, HangTimeouts().long_s)
    killed = (timeouts.ANSWER_S, timeouts.GONE_S, timeouts.UNKILLABLE_S)
    node = (timeouts.STARTED_AGAIN_S, timeouts.SUSPECT_AFTER_S, timeouts.LOST_AFTER_S, Nodes(1, 1, "").join_timeout_s)
    fails = (timeouts.EXIT_HANDLERS_S, timeouts.FAILED_S)
    grace_s = next(field.default for field in fields(Request) if field.name == "grace_s")
    saves = (timeouts.TO_LEAVE_S, timeouts.PEER_LOST_GRACE_S, grace_s)
    # A process that is stopped is found and lost before the ranks that wait for it are taken for hanging.
    stopped = (timeouts.SILENT_S, 2 * timeouts.PART_LOOKS * timeouts.PART_LOOK_EVERY_S, HangTimeouts().floor_s)
    for order in (beats, killed, node, fails, saves, stopped):
        assert all(earlier < later for earlier, later in pairwise(order)), order
