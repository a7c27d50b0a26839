"""Who is late, who is waited for, and what is said of it."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.heartbeat import Stack, Stacks
from lockstep.heartbeat_message import PHASES, SourceLine
from lockstep.launch.diagnosis.hang_analysis import (
    HangTimeouts,
    HeartbeatTracker,
    Link,
    RankState,
    diagnose_hang,
    overdue_ranks,
    with_stacks,
)
from lockstep.launch.diagnosis.hang_report import Recovered, Worker, headline, report, sentence, why
from rank_states import anything, beat, rank_state, waiting, worlds

states = st.dictionaries(st.integers(0, 5), st.sampled_from(["running", "sleeping", "disk-sleep", "stopped", "zombie"]))


def shown(file):
    return file.rpartition("/")[2]


def told(diagnosis, stacks=None, workers=None):
    return report(diagnosis, stacks or {}, workers or {}, shown=shown, source=lambda file, line: "")


# ---- laws ------------------------------------------------------------------------------------------------------------


@given(worlds, states, st.dictionaries(st.integers(6, 8), st.integers(0, 1)))
def test_somebody_is_blamed_and_nobody_both_waits_and_is_waited_for(rank_states, states, exited):
    diagnosis = diagnose_hang(rank_states, states, exited)
    assert diagnosis.culprits
    assert set(diagnosis.culprits) <= {s.rank for s in rank_states} | set(exited)
    assert not set(diagnosis.culprits) & set(diagnosis.waiting)
    assert set(diagnosis.waiting) <= {s.rank for s in rank_states}
    assert set(diagnosis.to_end) <= {s.rank for s in rank_states}
    assert diagnosis.to_end or not rank_states, "somebody can be ended, so that the others leave what they hold"
    assert len(diagnosis.to_end) < len(rank_states) or len(rank_states) < 2


@given(worlds, states, st.dictionaries(st.integers(6, 8), st.integers(0, 1)))
def test_the_report_names_every_rank_and_each_line_is_of_use(rank_states, states, exited):
    diagnosis = diagnose_hang(rank_states, states, exited)
    text = told(diagnosis)
    for each in (headline(diagnosis, shown), text):
        ranks = {int(word.strip(",;:")) for word in each.replace("-", " ").split() if word.strip(",;:").isdigit()}
        assert all(rank in ranks or _within(rank, each) for rank in [s.rank for s in rank_states] + list(exited))
    assert all(line.strip() and line == line.rstrip() for line in text.splitlines())
    assert "  " not in sentence(diagnosis, shown)
    assert why(diagnosis) in text


def _within(rank, text):
    runs = [word.strip(",;:") for word in text.split() if "-" in word]
    return any(int(a) <= rank <= int(b) for a, _, b in (r.partition("-") for r in runs) if a.isdigit() and b.isdigit())


@given(st.integers(2, 6), st.data())
def test_the_one_rank_that_is_not_in_the_collective_is_the_culprit(ranks, data):
    culprit = data.draw(st.integers(0, ranks - 1))
    where = data.draw(anything) | {"meets": False, "silent_s": 0.1}
    collectives = where["collectives"]
    rank_states = [
        rank_state(r, **where) if r == culprit else waiting(r, collectives=collectives + 1) for r in range(ranks)
    ]
    diagnosis = diagnose_hang(rank_states, {}, {})
    assert diagnosis.culprits == (culprit,)
    assert diagnosis.waiting == tuple(r for r in range(ranks) if r != culprit)
    assert diagnosis.kind == ("loader" if where["call"] == "next(loader)" else "busy")
    assert not diagnosis.is_certain, "what it does may be meant to take so long"


@given(worlds, st.data())
def test_a_rank_that_is_stopped_is_the_culprit_wherever_the_others_are(rank_states, data):
    heard = [replace(s, silent_s=0.1) for s in rank_states]
    stopped = data.draw(st.sampled_from(heard)).rank
    diagnosis = diagnose_hang(heard, {stopped: "stopped"}, {})
    assert (diagnosis.culprits, diagnosis.kind) == ((stopped,), "stopped")
    assert diagnosis.is_certain


@given(st.lists(st.floats(0.001, 1e4), max_size=70), st.sampled_from(PHASES), st.floats(0.1, 1e4))
def test_patience_grows_with_the_steps_and_obeys_the_user(times, phase, own):
    timeouts = HangTimeouts()
    allowed_s = timeouts.allowed_s(phase, times)
    assert allowed_s >= 30
    assert allowed_s >= 120 or (times and phase in ("data", "forward", "backward", "reduction", "update"))
    assert timeouts.allowed_s(phase, [2 * t for t in times]) >= allowed_s
    assert HangTimeouts(own).allowed_s(phase, times) == (math.inf if phase == "input" else own)


@given(st.integers(1, 4), st.floats(0.2, 1.0), st.integers(1, 400), st.randoms(use_true_random=False))
def test_a_world_that_moves_is_never_late(ranks, pause_s, beats, luck):
    timeouts = HangTimeouts(2.0)
    tracker = HeartbeatTracker(range(ranks), 0.0)
    now = 0.0
    for number in range(beats):
        now += pause_s
        tracker.note_time(now)
        for rank in range(ranks):
            tracker.hear(beat(rank, step=number, phase_changes=5 * number, meets=luck.random() < 0.5), now)
        assert overdue_ranks(tracker.rank_states(now), timeouts, tracker.step_times) == []


@given(st.floats(1.6, 1e6), st.floats(0.1, 5.0))
def test_what_was_missed_while_the_listener_was_away_is_nobodys_fault(away_s, then_s):
    tracker = HeartbeatTracker(range(2), 0.0)
    for rank in range(2):
        tracker.hear(beat(rank), 0.5)
    tracker.note_time(1.0)
    tracker.note_time(1.0 + away_s)
    before = tracker.rank_states(1.0 + away_s)
    assert [round(s.silent_s, 3) for s in before] == [0.5, 0.5]
    assert overdue_ranks(before, HangTimeouts(2.0), []) == []
    (after, _) = tracker.rank_states(1.0 + away_s + then_s)
    assert after.silent_s == pytest.approx(0.5 + then_s, abs=1e-3)


# ---- cases -----------------------------------------------------------------------------------------------------------


def test_the_line_that_everybody_hopes_for():
    at, data = SourceLine("/home/ada/train.py", 88, "main"), SourceLine("/home/ada/data.py", 17, "__getitem__")
    rank_states = [
        waiting(r, "backward", step=411, phase="reduction", place=at, still_s=60.7) for r in (0, 1, 3)
    ] + [rank_state(2, step=411, phase="data", call="next(loader)", place=data, still_s=61.2)]  # fmt: skip
    diagnosis = diagnose_hang(sorted(rank_states, key=lambda s: s.rank), {}, {})
    assert headline(diagnosis, shown) == (
        "ranks 0, 1, 3 in the reduction of step 412 (train.py:88); rank 2 in next(loader) for 61 s (data.py:17)"
    )


def test_a_rank_late_in_one_world_is_told_with_each_stack_once():
    stacks = {r: Stacks(Stack((SourceLine("/home/ada/train.py", 28, "step"),)), "") for r in range(3)}
    stacks[3] = Stacks(
        Stack((SourceLine("/home/ada/data.py", 7, "load"), SourceLine("/home/ada/train.py", 9, "main"))), ""
    )
    worker = Worker(4711, "disk-sleep", Stacks(Stack((SourceLine("/home/ada/data.py", 3, "read"),)), ""))
    rank_states = [*(waiting(r) for r in range(3)), rank_state(3, call="next(loader)")]
    text = told(diagnose_hang(rank_states, {}, {}), stacks, {3: [worker]})
    assert text.splitlines() == [
        "hang: no progress for 60 s",
        "  ranks 0-2 in all_reduce (train.py:28); rank 3 in next(loader) for 60 s (train.py:28)",
        "  => rank 3 waits for the processes of its data loader",
        "  rank 3, innermost first:",
        "      data.py:7 in load",
        "      train.py:9 in main",
        "  ranks 0-2, innermost first:",
        "      train.py:28 in step",
        "  a process that rank 3 has started (4711, waits for a disk), innermost first:",
        "      data.py:3 in read",
        "  look at the dataset's code and its locks; workers=0 loads in the rank itself, where it can be seen",
    ]


@pytest.mark.parametrize(
    ("others", "odd", "culprits", "kind"),
    [
        ({}, {"call": "broadcast"}, (2,), "mismatched"),
        ({}, {"collectives": 17}, (2,), "mismatched"),
        ({"phase": "reduction"}, {"phase": "reduction", "collectives": 17}, (0, 1, 2), "all_waiting"),
        ({}, {"place": SourceLine("/home/ada/train.py", 99, "end")}, (2,), "mismatched"),
        ({}, {}, (0, 1, 2), "all_waiting"),
    ],
)
def test_ranks_that_all_wait_either_parted_ways_or_wait_for_the_network(others, odd, culprits, kind):
    diagnosis = diagnose_hang(
        [waiting(0, **others), waiting(1, **others), waiting(2, **{"call": "all_reduce"} | odd)], {}, {}
    )
    assert (diagnosis.culprits, diagnosis.kind) == (culprits, kind)
    assert diagnosis.is_certain == (kind == "mismatched")


CUT = [Link("n2", "n3"), Link("n3", "n2"), Link("n1", "n3")]


@pytest.mark.parametrize("odd", [{}, {"collectives": 17}, {"call": "broadcast"}])
@pytest.mark.parametrize(("cut", "to_end"), [(CUT[:1], (2,)), (CUT[:2], (2,)), (CUT, (2,)), ([Link("n1", "n2")], (1,))])
def test_a_network_that_is_cut_explains_whatever_ranks_wait_in_and_the_ranks_of_one_host_are_spared(odd, cut, to_end):
    rank_states = [waiting(0), waiting(1), waiting(2, **{"call": "all_reduce"} | odd)]
    diagnosis = diagnose_hang(rank_states, {}, {}, cut, {0: "n1", 1: "n2", 2: "n3"})
    assert (diagnosis.kind, diagnosis.to_end, diagnosis.is_certain) == ("network", to_end, False)
    assert diagnosis.nobody_differs
    assert "parted" not in told(diagnosis)
    if len(cut) == 2:
        assert "=> all ranks wait for each other: n2 and n3 do not reach each other\n" in told(diagnosis)
    if len(cut) == 1:
        assert f"what {cut[0].sender} sends to {cut[0].to} is not acknowledged" in told(diagnosis)
    busy = diagnose_hang([*rank_states[:2], rank_state(2, call="")], {}, {}, cut, {0: "n1", 1: "n2", 2: "n3"})
    assert (busy.kind, busy.culprits, busy.to_end) == ("busy", (2,), (2,)), "who does not wait explains it, too"


def test_of_two_ranks_that_parted_ways_none_is_the_odd_one():
    diagnosis = diagnose_hang([waiting(0), waiting(1, "broadcast")], {}, {})
    assert (diagnosis.culprits, diagnosis.waiting) == ((0, 1), ())
    assert why(diagnosis) == "ranks have parted ways: ranks 0, 1 wait in different collectives"


def test_ranks_may_wait_for_one_that_has_left():
    diagnosis = diagnose_hang([waiting(0), waiting(2)], {}, {1: 0})
    assert (diagnosis.kind, diagnosis.culprits, diagnosis.waiting) == ("exited", (1,), (0, 2))
    assert "rank 1 had left with exit code 0" in headline(diagnosis, shown)
    assert why(diagnosis) == "rank 1 has left, and the others wait for it"


def test_a_wait_that_shows_no_sign_is_known_by_the_number_of_collectives():
    rank_states = [rank_state(0, call="backward", collectives=17), rank_state(1, collectives=16, still_s=0.2)]
    diagnosis = diagnose_hang(rank_states, {}, {})
    assert (diagnosis.culprits, diagnosis.waiting) == ((1,), (0,))


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("running", "gil_held"),
        ("sleeping", "gil_held"),
        ("disk-sleep", "disk"),
        ("stopped", "stopped"),
        ("tracing-stop", "stopped"),
    ],
)
def test_why_a_rank_is_silent_is_told_by_the_kernel(state, kind):
    rank_states = [waiting(0), rank_state(1, silent_s=59.0)]
    diagnosis = diagnose_hang(rank_states, {0: "sleeping", 1: state}, {})
    assert (diagnosis.kind, diagnosis.culprits, diagnosis.waiting) == (kind, (1,), (0,))
    assert diagnosis.is_certain
    alone = diagnose_hang([rank_states[1]], {1: state}, {})
    assert alone.is_certain == (kind == "stopped"), "a long call may be meant, while nobody waits for it"


def test_a_silent_rank_is_where_its_stack_says():
    diagnosis = diagnose_hang([waiting(0), rank_state(1, silent_s=59.0)], {}, {})
    better = with_stacks(diagnosis, {1: Stacks(Stack((SourceLine("/home/ada/ext.py", 5, "spin"),)), "")})
    assert "rank 1 silent in step 5 for 60 s (at ext.py:5)" in headline(better, shown)


def test_ranks_that_nobody_has_heard_of_yet_are_not_late():
    tracker = HeartbeatTracker(range(2), 0.0)
    for second in range(300):
        tracker.note_time(float(second))
    assert overdue_ranks(tracker.rank_states(300.0), HangTimeouts(1.0), []) == []
    tracker.hear(beat(0, phase="script"), 300.0)
    for second in range(300, 422):
        tracker.note_time(float(second))
        tracker.hear(beat(0, step=second), float(second))
    assert overdue_ranks(tracker.rank_states(419.0), HangTimeouts(1.0), []) == []
    assert overdue_ranks(tracker.rank_states(421.0), HangTimeouts(1.0), []) == [1]
    assert why(diagnose_hang(tracker.rank_states(421.0), {}, {})).startswith("rank 1 is in compiled code")


def test_a_script_that_computes_is_not_late_but_one_that_sleeps_is():
    tracker = HeartbeatTracker(range(2), 0.0)
    for tick in range(1, 20):
        tracker.note_time(tick / 2)
        tracker.hear(beat(0, phase="script", phase_changes=0, cpu_s=tick / 2), tick / 2)
        tracker.hear(beat(1, phase="script", phase_changes=0, cpu_s=1.0), tick / 2)
    assert overdue_ranks(tracker.rank_states(9.5), HangTimeouts(5.0), []) == [1]


def test_a_rank_of_run_is_late_also_where_it_computes():
    stuck = RankState(0, beat(0, phase="forward"), 0.1, 1.0, 40.0, False)
    assert overdue_ranks([stuck], HangTimeouts(), [0.1]) == [0]
    assert overdue_ranks([stuck], HangTimeouts(), [10.0]) == []
    assert overdue_ranks([replace(stuck, beat=beat(0, phase="script"))], HangTimeouts(), [0.1]) == []


def test_the_others_may_wait_as_long_as_a_save_may_take():
    rank_states = [waiting(0, still_s=60.0), rank_state(1, still_s=60.0, phase="save")]
    assert overdue_ranks(rank_states, HangTimeouts(), [0.1]) == []
    assert overdue_ranks([waiting(0, still_s=121.0), rank_states[1]], HangTimeouts(), [0.1]) == [0]


def test_how_long_steps_take_is_learnt():
    tracker = HeartbeatTracker([0], 0.0)
    for second in range(0, 100, 10):
        tracker.hear(beat(0, step=second // 5), float(second))
    assert tracker.step_times == [5.0] * 9


def test_a_rank_that_left_is_no_longer_watched():
    tracker = HeartbeatTracker(range(2), 0.0)
    tracker.rank_exited(1, 0)
    tracker.hear(beat(1), 1.0)
    tracker.hear(beat(7), 1.0)
    assert [s.rank for s in tracker.rank_states(1.0)] == [0]
    assert tracker.exited == {1: 0}


def test_recovery_is_told():
    assert str(Recovered((2,), 75.2)) == "rank 2 moves again, after 75 s: the run goes on"


def test_any_order_of_heartbeats_ends_in_the_same_rank_states():
    def seen(order):
        tracker = HeartbeatTracker(range(4), 0.0)
        for rank in order:
            tracker.hear(beat(rank), 1.0)
        return tracker.rank_states(2.0)

    ranks = list(range(4))
    first = seen(ranks)
    random.Random(1).shuffle(ranks)
    assert seen(ranks) == first


def test_nobody_is_late_while_a_rank_waits_for_its_user_nor_just_afterwards():
    timeouts, tracker = HangTimeouts(2.0), HeartbeatTracker(range(2), 0.0)

    def hear(now, phase):
        tracker.note_time(now)
        tracker.hear(beat(0, phase="reduction", meets=True), now)
        tracker.hear(beat(1, phase=phase), now)
        return overdue_ranks(tracker.rank_states(now), timeouts, tracker.step_times)

    for now in range(3600):
        assert hear(float(now), "input") == []
    assert hear(3600.0, "forward") == [], "it was the user for whom rank 0 has waited"
    assert hear(3601.0, "forward") == []
    assert hear(3602.0, "forward") == []
    assert hear(3603.0, "forward") == [0, 1]
