"""One timeline of several ranks, and who was late in it."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lockstep.scale.trace_run import (
    clock_offsets,
    communication,
    laid_out,
    lanes_of,
    median_and_worst,
    merge_traces,
    straggler,
    straggler_lines,
    stragglers,
)
from records import record_of, step_of

BASE_NS = 1_000_000_000 * 10**9  # 1e9 s since 1970, where the records begin
EVENTS = st.lists(
    st.fixed_dictionaries(
        {
            "ph": st.just("X"),
            "name": st.sampled_from(["aten::mm", "gloo:all_reduce", "ncclDevKernel_AllReduce", "step"]),
            "pid": st.integers(1, 3),
            "tid": st.integers(1, 3),
            "ts": st.floats(0, 1e6),
            "dur": st.floats(0, 1e4),
            "id": st.integers(0, 5),
        }
    ),
    max_size=12,
)


@given(st.lists(EVENTS, min_size=1, max_size=4), st.lists(st.integers(0, 10**9), min_size=4, max_size=4))
def test_merged_traces_keep_every_event_and_when_it_was(traces, bases):
    records = [record_of(rank, [step_of(0), step_of(1)], len(traces)) for rank in range(len(traces))]
    given_traces = [{"traceEvents": t, "baseTimeNanoseconds": BASE_NS + b} for t, b in zip(traces, bases, strict=False)]
    merged = merge_traces(given_traces, records)
    own = [event for event in merged["traceEvents"] if event.get("cat") != "step" and event["ph"] == "X"]
    before = [(rank, event) for rank, trace in enumerate(traces) for event in trace]
    assert len(own) == len(before)
    processes, ids = {}, {}
    for (rank, old), new in zip(before, own, strict=True):
        assert (new["name"], new["tid"], new["dur"]) == (old["name"], old["tid"], old["dur"])
        at_us = (merged["baseTimeNanoseconds"] - BASE_NS) / 1e3 + new["ts"]
        assert abs(at_us - (bases[rank] / 1e3 + old["ts"])) < 1
        assert processes.setdefault(new["pid"], (rank, old["pid"])) == (rank, old["pid"]), "two ranks in one process"
        assert ids.setdefault(new["id"], (rank, old["id"])) == (rank, old["id"]), "an arrow from one rank to another"
    lanes = [event for event in merged["traceEvents"] if event.get("cat") == "step"]
    assert {event["name"] for event in lanes} == {"data", "forward", "backward", "exposed", "optimizer", "other"}
    # The process of a rank has a name in every real trace.
    named = [
        [{"ph": "M", "name": "process_name", "pid": p, "args": {"name": "python"}} for p in (1, 2, 3)] for _ in traces
    ]
    given_traces = [{**t, "traceEvents": [*n, *t["traceEvents"]]} for t, n in zip(given_traces, named, strict=True)]
    sends = communication(merge_traces(given_traces, records), records)
    for rank, trace in enumerate(traces):
        assert len(sends[rank]) == sum(event["name"].startswith(("gloo:", "nccl")) for event in trace)


@given(st.floats(-100, 100), st.lists(st.floats(-0.001, 0.001), min_size=6, max_size=6))
def test_clocks_of_other_hosts_are_set_by_when_reductions_end(ahead, jitter):
    here = record_of(0, map(step_of, range(6)), 3)
    near = record_of(1, map(step_of, range(6)), 3, began_at=1e9 + 0.25)
    late = [step_of(n, began=step_of(n).began_s + shift) for n, shift in enumerate(jitter)]
    there = record_of(2, late, 3, host="b", began_at=1e9 + ahead)
    offsets = clock_offsets([here, near, there])
    assert offsets[:2] == [0, 0], "ranks of one host share a clock"
    assert abs(offsets[2] - ahead) <= 0.001 + 1e-6


@given(st.integers(2, 8), st.data(), st.sampled_from(["data", "compute", "host"]), st.floats(0.01, 10.0))
def test_the_late_rank_and_what_it_did_are_named(ranks, data, cause, extra):
    rank = data.draw(st.integers(0, ranks - 1))
    late = {
        "data": step_of(data=0.002 + extra),
        "compute": step_of(forward=0.004 + extra),
        "host": step_of(forward=0.004 + extra, cpu=0.01),
    }[cause]
    usual = step_of(exposed=0.001 + extra)  # the others wait for it
    found = straggler([late if r == rank else usual for r in range(ranks)])
    assert (found.rank, found.cause) == (rank, cause)
    assert found.late_s > 0
    assert straggler([usual] * ranks) is None
    assert straggler([late]) is None


def test_what_is_said_of_stragglers():
    usual, late = [step_of(n) for n in range(4)], [step_of(n, data=0.1) for n in range(4)]
    records = [record_of(0, usual), record_of(1, late), record_of(2, usual)]
    assert straggler_lines(stragglers(records, first=1), 3) == [
        "rank 1 was late in 3 of 3 steps, by 98 ms: its loader had nothing ready"
    ]
    assert straggler_lines([], 5) == ["no rank was late in 5 steps"]


def test_the_parts_of_a_step_follow_each_other():
    step = step_of(3, data_s=(0.1, 0.2), forward_s=(0.3, 0.4), backward_s=(0.5, 0.6))
    spans = laid_out(step)
    assert [span.name for span in spans[:6]] == ["data", "forward", "backward"] * 2
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(spans))
    assert abs(spans[-1].end_s - step.began_s - step.total_s) < 1e-9


def test_a_picture_shows_the_median_step_and_the_worst_one():
    steps = [step_of(n, forward=0.004 + 0.01 * n) for n in (0, 4, 2, 1, 3)]
    records = [record_of(0, steps), record_of(1, steps)]
    assert median_and_worst(records) == (2, 1)
    lanes = lanes_of(records, {}, 1)
    assert sorted(lanes) == [0, 1]
    assert abs(min(span.start_s for own, _ in lanes.values() for span in own)) < 1e-6
