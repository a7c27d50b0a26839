"""Who is late, who is waited for, and what is said of it."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_states import anything, beat, sight, waiting, worlds

from lockstep.heartbeat import Stack, Stacks
from lockstep.heartbeat_message import PHASES, SourceLine
from lockstep.launch.diagnosis.hang_analysis import (
    HangTimeouts,
    HeartbeatTracker,
    RankState,
    Recovered,
    Worker,
    explain,
    headline,
    overdue_ranks,
    report,
    sentence,
    why,
    with_stacks,
)

states = st.dictionaries(st.integers(0, 5), st.sampled_from("RSDTZ"))


def shown(file):
    return file.rpartition("/")[2]


def told(stall, stacks=None, workers=None):
    return report(stall, stacks or {}, workers or {}, shown=shown, source=lambda file, line: "")


# ---- laws ------------------------------------------------------------------------------------------------------------


@given(worlds, states, st.dictionaries(st.integers(6, 8), st.integers(0, 1)))
def test_somebody_is_blamed_and_nobody_both_waits_and_is_waited_for(sights, states, gone):
    stall = explain(sights, states, gone)
    assert stall.culprits
    assert set(stall.culprits) <= {s.rank for s in sights} | set(gone)
    assert not set(stall.culprits) & set(stall.waiting)
    assert set(stall.waiting) <= {s.rank for s in sights}


@given(worlds, states, st.dictionaries(st.integers(6, 8), st.integers(0, 1)))
def test_the_report_names_every_rank_and_each_line_is_of_use(sights, states, gone):
    stall = explain(sights, states, gone)
    text = told(stall)
    for each in (headline(stall, shown), text):
        ranks = {int(word.strip(",;:")) for word in each.replace("-", " ").split() if word.strip(",;:").isdigit()}
        assert all(rank in ranks or _within(rank, each) for rank in [s.rank for s in sights] + list(gone))
    assert all(line.strip() and line == line.rstrip() for line in text.splitlines())
    assert "  " not in sentence(stall, shown)
    assert why(stall) in text


def _within(rank, text):
    runs = [word.strip(",;:") for word in text.split() if "-" in word]
    return any(int(a) <= rank <= int(b) for a, _, b in (r.partition("-") for r in runs) if a.isdigit() and b.isdigit())


@given(st.integers(2, 6), st.data())
def test_the_one_rank_that_is_not_in_the_collective_is_the_culprit(ranks, data):
    culprit = data.draw(st.integers(0, ranks - 1))
    where = data.draw(anything) | {"meets": False, "silent_s": 0.1}
    collectives = where["collectives"]
    sights = [sight(r, **where) if r == culprit else waiting(r, collectives=collectives + 1) for r in range(ranks)]
    stall = explain(sights, {}, {})
    assert stall.culprits == (culprit,)
    assert stall.waiting == tuple(r for r in range(ranks) if r != culprit)
    assert stall.kind == ("loader" if where["call"] == "next(loader)" else "busy")
    assert not stall.is_certain, "what it does may be meant to take so long"


@given(worlds, st.data())
def test_a_rank_that_is_stopped_is_the_culprit_wherever_the_others_are(sights, data):
    heard = [replace(s, silent_s=0.1) for s in sights]
    stopped = data.draw(st.sampled_from(heard)).rank
    stall = explain(heard, {stopped: "T"}, {})
    assert (stall.culprits, stall.kind) == ((stopped,), "stopped")
    assert stall.is_certain


@given(st.lists(st.floats(0.001, 1e4), max_size=70), st.sampled_from(PHASES), st.floats(0.1, 1e4))
def test_patience_grows_with_the_steps_and_obeys_the_user(times, phase, own):
    patience = HangTimeouts()
    allowed_s = patience.allowed_s(phase, times)
    assert allowed_s >= 30
    assert allowed_s >= 120 or (times and phase in ("data", "forward", "backward", "reduction", "update"))
    assert patience.allowed_s(phase, [2 * t for t in times]) >= allowed_s
    assert HangTimeouts(own).allowed_s(phase, times) == own


@given(st.integers(1, 4), st.floats(0.2, 1.0), st.integers(1, 400), st.randoms(use_true_random=False))
def test_a_world_that_moves_is_never_late(ranks, pause_s, beats, luck):
    patience = HangTimeouts(2.0)
    watch = HeartbeatTracker(range(ranks), 0.0)
    now = 0.0
    for number in range(beats):
        now += pause_s
        watch.look(now)
        for rank in range(ranks):
            watch.hear(beat(rank, step=number, moves=5 * number, meets=luck.random() < 0.5), now)
        assert overdue_ranks(watch.sights(now), patience, watch.step_times) == []


@given(st.floats(1.6, 1e6), st.floats(0.1, 5.0))
def test_what_was_missed_while_the_listener_was_away_is_nobodys_fault(away_s, then_s):
    watch = HeartbeatTracker(range(2), 0.0)
    for rank in range(2):
        watch.hear(beat(rank), 0.5)
    watch.look(1.0)
    watch.look(1.0 + away_s)
    before = watch.sights(1.0 + away_s)
    assert [round(s.silent_s, 3) for s in before] == [0.5, 0.5]
    assert overdue_ranks(before, HangTimeouts(2.0), []) == []
    (after, _) = watch.sights(1.0 + away_s + then_s)
    assert after.silent_s == pytest.approx(0.5 + then_s, abs=1e-3)


# ---- cases -----------------------------------------------------------------------------------------------------------


def test_the_line_that_everybody_hopes_for():
    at, data = SourceLine("/home/ada/train.py", 88, "main"), SourceLine("/home/ada/data.py", 17, "__getitem__")
    sights = [
        waiting(r, "backward", step=411, phase="reduction", place=at, still_s=60.7) for r in (0, 1, 3)
    ] + [sight(2, step=411, phase="data", call="next(loader)", place=data, still_s=61.2)]  # fmt: skip
    stall = explain(sorted(sights, key=lambda s: s.rank), {}, {})
    assert headline(stall, shown) == (
        "ranks 0, 1, 3 in the reduction of step 412 (train.py:88); rank 2 in next(loader) for 61 s (data.py:17)"
    )


def test_a_rank_late_in_one_world_is_told_with_each_stack_once():
    stacks = {r: Stacks(Stack((SourceLine("/home/ada/train.py", 28, "step"),)), "") for r in range(3)}
    stacks[3] = Stacks(
        Stack((SourceLine("/home/ada/data.py", 7, "load"), SourceLine("/home/ada/train.py", 9, "main"))), ""
    )
    worker = Worker(4711, "D", Stacks(Stack((SourceLine("/home/ada/data.py", 3, "read"),)), ""))
    sights = [*(waiting(r) for r in range(3)), sight(3, call="next(loader)")]
    text = told(explain(sights, {}, {}), stacks, {3: [worker]})
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
        ({}, {"call": "broadcast"}, (2,), "apart"),
        ({}, {"collectives": 17}, (2,), "apart"),
        ({}, {"place": SourceLine("/home/ada/train.py", 99, "end")}, (2,), "apart"),
        ({}, {}, (0, 1, 2), "together"),
    ],
)
def test_ranks_that_all_wait_either_parted_ways_or_wait_for_the_network(others, odd, culprits, kind):
    stall = explain([waiting(0, **others), waiting(1, **others), waiting(2, **{"call": "all_reduce"} | odd)], {}, {})
    assert (stall.culprits, stall.kind) == (culprits, kind)
    assert stall.is_certain == (kind == "apart")


def test_of_two_ranks_that_parted_ways_none_is_the_odd_one():
    stall = explain([waiting(0), waiting(1, "broadcast")], {}, {})
    assert (stall.culprits, stall.waiting) == ((0, 1), ())
    assert why(stall) == "ranks have parted ways: ranks 0, 1 wait in different collectives"


def test_ranks_may_wait_for_one_that_has_left():
    stall = explain([waiting(0), waiting(2)], {}, {1: 0})
    assert (stall.kind, stall.culprits, stall.waiting) == ("left", (1,), (0, 2))
    assert "rank 1 had left with exit code 0" in headline(stall, shown)
    assert why(stall) == "rank 1 has left, and the others wait for it"


def test_a_wait_that_shows_no_sign_is_known_by_the_number_of_collectives():
    sights = [sight(0, call="backward", collectives=17), sight(1, collectives=16, still_s=0.2)]
    stall = explain(sights, {}, {})
    assert (stall.culprits, stall.waiting) == ((1,), (0,))


@pytest.mark.parametrize(("letter", "kind"), [("R", "locked"), ("S", "locked"), ("D", "disk"), ("T", "stopped")])
def test_why_a_rank_is_silent_is_told_by_the_kernel(letter, kind):
    sights = [waiting(0), sight(1, silent_s=59.0)]
    stall = explain(sights, {0: "S", 1: letter}, {})
    assert (stall.kind, stall.culprits, stall.waiting) == (kind, (1,), (0,))
    assert stall.is_certain
    alone = explain([sights[1]], {1: letter}, {})
    assert alone.is_certain == (letter == "T"), "a long call may be meant, while nobody waits for it"


def test_a_silent_rank_is_where_its_stack_says():
    stall = explain([waiting(0), sight(1, silent_s=59.0)], {}, {})
    better = with_stacks(stall, {1: Stacks(Stack((SourceLine("/home/ada/ext.py", 5, "spin"),)), "")})
    assert "rank 1 silent in step 5 for 60 s (at ext.py:5)" in headline(better, shown)


def test_ranks_that_nobody_has_heard_of_yet_are_not_late():
    watch = HeartbeatTracker(range(2), 0.0)
    for second in range(300):
        watch.look(float(second))
    assert overdue_ranks(watch.sights(300.0), HangTimeouts(1.0), []) == []
    watch.hear(beat(0, phase="script"), 300.0)
    for second in range(300, 422):
        watch.look(float(second))
        watch.hear(beat(0, step=second), float(second))
    assert overdue_ranks(watch.sights(419.0), HangTimeouts(1.0), []) == []
    assert overdue_ranks(watch.sights(421.0), HangTimeouts(1.0), []) == [1]
    assert why(explain(watch.sights(421.0), {}, {})).startswith("rank 1 is in compiled code")


def test_a_script_that_computes_is_not_late_but_one_that_sleeps_is():
    watch = HeartbeatTracker(range(2), 0.0)
    for tick in range(1, 20):
        watch.look(tick / 2)
        watch.hear(beat(0, phase="script", moves=0, cpu_s=tick / 2), tick / 2)
        watch.hear(beat(1, phase="script", moves=0, cpu_s=1.0), tick / 2)
    assert overdue_ranks(watch.sights(9.5), HangTimeouts(5.0), []) == [1]


def test_a_rank_of_run_is_late_also_where_it_computes():
    stuck = RankState(0, beat(0, phase="forward"), 0.1, 1.0, 40.0, False)
    assert overdue_ranks([stuck], HangTimeouts(), [0.1]) == [0]
    assert overdue_ranks([stuck], HangTimeouts(), [10.0]) == []
    assert overdue_ranks([replace(stuck, beat=beat(0, phase="script"))], HangTimeouts(), [0.1]) == []


def test_the_others_may_wait_as_long_as_a_save_may_take():
    sights = [waiting(0, still_s=60.0), sight(1, still_s=60.0, phase="save")]
    assert overdue_ranks(sights, HangTimeouts(), [0.1]) == []
    assert overdue_ranks([waiting(0, still_s=121.0), sights[1]], HangTimeouts(), [0.1]) == [0]


def test_how_long_steps_take_is_learnt():
    watch = HeartbeatTracker([0], 0.0)
    for second in range(0, 100, 10):
        watch.hear(beat(0, step=second // 5), float(second))
    assert watch.step_times == [5.0] * 9


def test_a_rank_that_left_is_no_longer_watched():
    watch = HeartbeatTracker(range(2), 0.0)
    watch.left(1, 0)
    watch.hear(beat(1), 1.0)
    watch.hear(beat(7), 1.0)
    assert [s.rank for s in watch.sights(1.0)] == [0]
    assert watch.gone == {1: 0}


def test_recovery_is_told():
    assert str(Recovered((2,), 75.2)) == "rank 2 moves again, after 75 s: the run goes on"


def test_any_order_of_heartbeats_ends_in_the_same_sights():
    def seen(order):
        watch = HeartbeatTracker(range(4), 0.0)
        for rank in order:
            watch.hear(beat(rank), 1.0)
        return watch.sights(2.0)

    ranks = list(range(4))
    first = seen(ranks)
    random.Random(1).shuffle(ranks)
    assert seen(ranks) == first
