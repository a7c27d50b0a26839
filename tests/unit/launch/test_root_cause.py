"""One cause out of everything that ranks say and do when a generation fails."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch.diagnosis.root_cause import (
    RankExit,
    diagnose,
    format_diagnosis,
    format_traceback,
    has_failed,
)


def said(rank, message, *, kind="ValueError", raised_s=0.0, collateral=False, line=3, traceback="Traceback ..."):
    return Failure(
        rank=rank,
        host="n1",
        kind=kind,
        message=message,
        file="train.py",
        line=line,
        source="step()",
        traceback=traceback,
        collateral=collateral,
        raised_s=raised_s,
        log_bytes=0,
    )


def raised(rank, message="bad label", *, at_s=1.0, by_us=False, **more):
    return RankExit(rank, 1, at_s, ended_by_us=by_us, failure=said(rank, message, raised_s=at_s, **more))


def lost(rank, at_s=1.0):
    return raised(rank, "Connection closed by peer", kind="RuntimeError", collateral=True, at_s=at_s)


def chose(rank, code):
    """A rank whose script called ``sys.exit(code)``."""
    return RankExit(rank, code, 1.0, failure=said(rank, str(code), kind="SystemExit"))


def left(rank, status, *, at_s=1.0, by_us=False, tail=""):
    return RankExit(rank, status, at_s, ended_by_us=by_us, log_tail=tail)


def told(exits):
    return format_diagnosis(diagnose(exits), log=lambda rank: f"r{rank}.log", shown=str, again="lockstep run")


exits = st.builds(
    lambda kind, rank, at_s: {
        "ok": left(rank, 0, at_s=at_s),
        "raised": raised(rank, at_s=at_s),
        "lost": lost(rank, at_s),
        "killed": left(rank, -9, at_s=at_s),
        "ended": left(rank, -15, at_s=at_s, by_us=True),
    }[kind],
    st.sampled_from(["ok", "raised", "lost", "killed", "ended"]),
    st.integers(0, 63),
    st.floats(0, 100),
)


@given(st.lists(exits, max_size=12, unique_by=lambda rank_exit: rank_exit.rank), st.randoms())
def test_the_cause_is_the_earliest_that_blames_no_peer_in_whatever_order_ranks_fell(some, random):
    failed = [rank_exit for rank_exit in some if has_failed(rank_exit)]
    if not failed:
        return
    cause = diagnose(some).cause
    own = [rank_exit for rank_exit in failed if not rank_exit.collateral]
    if cause not in failed:  # one that left as if all were done, where all others blame a peer
        assert not own
        assert cause.status == 0
        failed = [*failed, *(rank_exit for rank_exit in some if rank_exit.rank in diagnose(some).alike)]
        own = [cause]
    assert cause in (own or failed)
    assert cause.since_s == min(rank_exit.since_s for rank_exit in own or failed)
    shuffled = list(some)
    random.shuffle(shuffled)
    assert diagnose(shuffled).cause.since_s == cause.since_s
    format_ranks = {
        *diagnose(some).alike,
        *diagnose(some).collateral,
        *(rank_exit.rank for rank_exit in diagnose(some).others),
    }
    assert format_ranks == {rank_exit.rank for rank_exit in failed}, "each rank that failed is named once"


def test_a_rank_that_raised_first_is_the_cause_though_it_took_longer_to_end():
    slow = RankExit(2, 1, at_s=9.0, failure=said(2, "bad label", raised_s=1.0))
    odd = RankExit(0, 1, at_s=2.0, failure=said(0, "strange", raised_s=1.5))
    assert diagnose([odd, slow]).cause is slow


def test_nccls_watchdog_ends_a_rank_collaterally_and_other_aborts_do_not():
    watchdog = left(0, -6, at_s=1.0, tail="[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(...)\n")
    assert diagnose([watchdog, left(1, -9, at_s=2.0)]).cause.rank == 1
    assert diagnose([left(0, -6, at_s=1.0, tail="assertion failed"), left(1, -9, at_s=2.0)]).cause.rank == 0


@pytest.mark.parametrize(
    ("some", "stopped_by", "code"),
    [
        ([left(0, 0), left(1, 0)], None, 0),
        ([left(0, 0), left(1, 0)], 2, 0),
        ([left(0, 75), left(1, 75)], None, 75),
        ([left(0, 75), left(1, 0)], 15, 75),
        ([left(0, 74), left(1, 74)], None, 74),
        ([left(0, 74), left(1, 74)], 15, 74),
        ([left(0, 0), left(1, 74), left(2, 75)], None, 74),
        ([left(0, 74), raised(1)], None, 1),
        ([left(0, 74), left(1, -9)], None, 137),
        ([left(0, 3), left(1, 0)], None, 1),
        ([left(0, 2), left(1, 2)], None, 2),
        ([left(0, 2), left(1, 1)], None, 1),
        ([left(0, 2), lost(1)], None, 2),  # it would be the same the next time
        ([raised(0), lost(1)], None, 1),
        ([left(0, -9), lost(1)], None, 137),
        ([left(0, -11), lost(1)], None, 1),
        ([raised(0, at_s=0.5), left(1, -9, by_us=True)], None, 1),
        ([left(0, 75), lost(1)], None, 1),
        ([left(0, -15, by_us=True), left(1, -15, by_us=True)], 2, 130),
        ([left(0, -15, by_us=True), left(1, -15, by_us=True)], 15, 143),
        ([left(0, -9, by_us=True), left(1, -9, by_us=True)], 2, 130),
        ([left(0, -15), left(1, -15, by_us=True)], 15, 143),  # a scheduler told every process
        ([left(0, -15, by_us=True), lost(1)], 15, 143),
        ([left(0, 75), raised(1, "disk full", by_us=True)], 15, 1),  # the checkpoint failed
        ([left(0, -9), lost(1)], 15, 137),
        ([chose(0, 3), lost(1)], None, 3),
        ([chose(0, 124)], None, 1),  # which means that nodes did not come
        ([left(0, 130)], None, 130),  # Ctrl-C at a prompt
    ],
)
def test_exit_codes(some, stopped_by, code):
    assert diagnose(some, stopped_by=stopped_by).code == code


def unsaved(rank, message):
    return RankExit(rank, 74, 1.0, failure=said(rank, message, kind="SystemExit"))


def test_what_is_not_saved_is_told_with_its_reason_and_how_to_go_on():
    def lines_of(*exits):
        return told(exits).splitlines()

    reason = "74\ntrained to step 4, which no checkpoint in x holds: x is full. The last good one is of step 2"
    assert lines_of(unsaved(1, reason), unsaved(0, reason)) == [
        "not saved: the run is trained to its end, but its last checkpoint is missing",
        "    trained to step 4, which no checkpoint in x holds: x is full. The last good one is of step 2",
        "  to go on: lockstep run",
        "  full log: r0.log; the other ranks beside it",
    ]
    # A full disk may take the record, too.
    assert lines_of(left(0, 74), unsaved(1, reason))[1].endswith("step 2")
    assert lines_of(left(0, 74, tail="NOT SAVED: x is full\n"))[1:] == [
        "    NOT SAVED: x is full",
        "  to go on: lockstep run",
        "  full log: r0.log",
    ]
    assert len(lines_of(unsaved(0, "74"))) == 3


def test_equal_errors_are_told_once():
    assert told([raised(rank) for rank in range(7)] + [lost(7)]).splitlines() == [
        "run failed: ranks 0-6 of 8 (host n1) raised ValueError",
        "    bad label",
        "    at train.py:3",
        "        step()",
        "  rank 7 then lost its peer",
        "  full log: r0.log; the other ranks beside it",
    ]


def test_another_error_of_its_own_is_told_too():
    text = told([raised(0, at_s=1), raised(1, "other\nmore", at_s=2, kind="KeyError"), *map(lost, (2, 3, 5))])
    assert "rank 0 of 5 (host n1) raised ValueError" in text
    assert "  rank 1 also raised KeyError: other\n" in text
    assert "  ranks 2, 3, 5 then lost their peer\n" in text


def test_want_of_memory_is_told_instead_of_a_guess():
    text = told([replace(left(0, -9), memory="host memory ran out\nrank 0 held 3 GiB"), lost(1)])
    assert text.splitlines()[1:3] == ["    host memory ran out", "    rank 0 held 3 GiB"]
    assert "most often" not in text
    assert "most often the kernel" in told([left(0, -9), lost(1)])


def test_other_errors_that_are_alike_are_folded():
    text = told([raised(0), *(raised(rank, "second", kind="KeyError", at_s=2.0) for rank in (1, 2, 5))])
    assert "  ranks 1, 2, 5 also raised KeyError: second (x3 ranks)" in text.splitlines()


def test_a_full_gpu_is_told_with_the_peak_of_every_rank_that_could_say():
    full = [
        replace(rank_exit, failure=replace(rank_exit.failure, gpu=f"peak 7{rank_exit.rank} GiB of 80 GiB on H100"))
        for rank_exit in (raised(1, "CUDA out of memory", kind="torch.OutOfMemoryError"), lost(0, 2.0))
    ]
    lines = told(full).splitlines()
    at = lines.index("    rank 0: peak 70 GiB of 80 GiB on H100")
    assert lines[at + 1] == "    rank 1: peak 71 GiB of 80 GiB on H100"
    assert "peak" not in told([raised(1), lost(0)])


def test_what_the_user_has_to_change_is_told_without_a_traceback():
    rank_exit = replace(raised(0, "more ranks than micro-batches", kind="lockstep.errors.PlanError"), status=2)
    assert format_traceback(diagnose([rank_exit])) == ""
    assert format_traceback(diagnose([raised(0)])) != ""
    assert "most often the kernel when host memory runs out" in told([left(0, -9), lost(1)])


def test_a_rank_without_words_of_its_own_is_quoted_from_its_log():
    text = told([left(0, -6, tail="".join(f"line {number}\n" for number in range(20)))])
    assert "        line 19\n" in text
    assert "line 9" not in text


def test_when_all_blame_a_peer_that_is_said():
    """None of them is accused: it is the network, or a host."""
    both = told([lost(0), replace(lost(1), host="n2"), left(2, -15, by_us=True)])
    assert both.splitlines()[:2] == [
        "run failed: ranks 0, 1 of 3 (host n2) lost their connections to other ranks",
        "    rank 0: Connection closed by peer",
    ]
    assert "no rank reports a cause of its own" in both
    assert "raised" not in both
    assert format_traceback(diagnose([lost(0), lost(1)])) == ""
    assert told([lost(0), left(1, -15, by_us=True)]).startswith(
        "run failed: rank 0 of 2 lost its connection to another"
    )


def test_a_rank_that_left_as_if_all_were_done_is_the_cause_and_not_those_that_lost_it():
    text = told([lost(0, 2.0), left(1, 0, at_s=1.5), lost(2, 2.1), left(3, 0, at_s=9.0)])
    assert text.startswith("run failed: rank 1 of 4 left with exit code 0\n    while other ranks still needed it")
    assert "  ranks 0, 2 then lost their peer\n" in text
    assert diagnose([lost(0, 2.0), left(1, 75, at_s=1.5)], stopped_by=None).code == 1
    assert "no rank reports a cause" in told([lost(0, 2.0), left(1, 75, at_s=1.5, by_us=True)])


def test_long_messages_and_tracebacks_are_cut_in_the_middle():
    text = told([raised(0, "\n".join(f"<{number}>" for number in range(100)))])
    assert "<0>" in text
    assert "<99>" in text
    assert "<50>" not in text
    trace = format_traceback(diagnose([raised(0, traceback="\n".join(f"<{number}>" for number in range(100)))]))
    assert len(trace.splitlines()) <= 41
    assert trace.endswith("<99>")


def test_paths_are_shown_as_the_user_writes_them():
    rank_exit = raised(0)
    text = format_diagnosis(diagnose([rank_exit]), log=str, shown=lambda path: f"./{Path(path)}", again="")
    assert "    at ./train.py:3\n" in text
