"""How a search is shown while it runs: lines in a log, tables on a terminal, one line for `top --once`."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from lockstep.tune.record.journal import SearchPlan, SearchRecord
from lockstep.tune.results.live_views import SearchLines, choose_search_view, line_of, watch_search
from lockstep.tune.results.summary import time_left_s
from lockstep.tune.results.terminal_view import picture
from made_trials import trial


def record_of(*trials):
    return SearchRecord({}, {"trials": 9}, tuple(trials), ())


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def shown(steps):
    """The lines that a log has after each (seconds, trials) of ``steps`` was shown, and the view was closed."""
    clock, stream = Clock(), io.StringIO()
    view = SearchLines(stream, now=clock)
    for clock.now_s, trials in steps:
        view.show(record_of(*trials))
    view.close()
    return stream.getvalue().splitlines()


def test_lines_come_with_a_new_best_and_else_now_and_then():
    worse, better = trial(0, [2.0]), trial(1, [1.0])
    same = [(20 + tenth / 10, [worse]) for tenth in range(60)]
    lines = shown([(0.0, [worse]), *same, (26.1, [worse, better])])
    assert [line.rpartition("| ")[2] for line in lines] == [
        "best 2 (trial 0)",  # the same line is not written again, though time has passed
        "best 1 (trial 1)",
    ]
    many = [(step / 10, [trial(number, [2.0]) for number in range(step + 1)]) for step in range(200)]
    assert 10 <= len(shown(many)) <= 14  # each second for ten seconds, then each ten seconds, and at the end


def test_many_new_bests_do_not_flood_a_log():
    steps = [(30 + step / 100, [trial(number, [1000.0 - number]) for number in range(step + 1)]) for step in range(300)]
    assert len(shown([(0.0, []), *steps])) <= 5  # a line each second at most, by now, and the last one


def test_a_failure_is_told_when_it_is_the_first_of_its_kind():
    failed = trial(1, [], "failed", reason="out of memory")
    lines = shown([(0.0, [trial(0, [1.0])]), (0.5, [trial(0, [1.0]), failed])])
    assert re.search("1 failed", lines[1])


def drawn(record, now_s=100.0, width=100):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(picture(record, now_s))
    return console.file.getvalue()


def test_the_tables_tell_islands_and_workers():
    said = drawn(
        record_of(
            trial(0, [1.0, 0.5], island=0, worker=0),
            trial(1, [], "failed", island=1, worker=1, reason="no"),
            trial(2, [0.7], "running", island=1, worker=1, ranks=2, began=38.0, params={"lr": 0.25}),
        )
    )
    assert "2/9 trials" in said
    assert "best 0.5 (trial 0)" in said
    rows = [line.split() for line in said.splitlines()]
    assert ["1", "2", "0", "0", "1", "-", "-"] in rows  # island 1: two bred, one failed
    assert ["1", "1", "2", "2", "1", "0.7", "1", "m", "02", "s", "lr=0.25"] in rows  # worker 1 has run for 62 s
    assert ["0", "0", "1", "-", "-", "-", "-"] in rows  # worker 0 is free


def test_many_islands_and_workers_do_not_push_the_screen_away():
    said = drawn(record_of(*(trial(number, [1.0], island=number, worker=number) for number in range(100))))
    assert said.count("\n") < 50
    assert "88 islands more" in said
    assert "84 workers more" in said


def test_nothing_is_drawn_wider_than_the_terminal():
    running = trial(0, [0.1], "running", params={f"parameter_{number}": number for number in range(30)})
    assert max(map(len, drawn(record_of(running), width=80).splitlines())) <= 80


def test_live_tables_are_drawn_over_and_lines_go_above():
    stream = io.StringIO()
    env = {"LOCKSTEP_VIEW": "live", "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    view = choose_search_view(stream, env, wall_clock=lambda: 5.0)
    view.show(record_of(trial(0, [1.0], "running")))
    view.line("from a rank")
    view.show(record_of(trial(0, [1.0])))
    view.close()
    assert "from a rank" in stream.getvalue()
    assert "\x1b[1A" in stream.getvalue()  # up, to draw over what was there


@pytest.mark.parametrize(("word", "lines"), [("lines", 1), ("silent", 0), ("live", 8)])
def test_the_variable_has_the_last_word(word, lines):
    stream = io.StringIO()
    view = choose_search_view(stream, {"LOCKSTEP_VIEW": word})
    view.show(record_of(trial(0, [1.0])))
    view.close()
    assert len(stream.getvalue().splitlines()) >= lines
    assert bool(stream.getvalue()) == bool(lines)


def test_a_search_is_watched_until_it_is_over(tmp_path):
    SearchPlan({}, {"trials": 3}).write(tmp_path)
    looks = iter([False, False, True])
    stream, slept = io.StringIO(), []
    watch_search(tmp_path, stream, {}, once=False, is_over=lambda: next(looks), sleep=slept.append)
    assert len(slept) == 2
    assert stream.getvalue().splitlines()[-1].startswith("the search has ended")
    once = io.StringIO()
    watch_search(tmp_path, once, {}, once=True, is_over=lambda: False)
    assert once.getvalue() == line_of(replace(record_of(), settings={"trials": 3})) + "\n" == "0 of 3 trials\n"


def test_the_time_that_is_left_goes_by_the_last_trials_and_the_workers_that_run():
    ended = [trial(number, [1.0], began=0.0, ended=1000.0) for number in range(10)]
    ended += [trial(10 + number, [1.0], began=number * 10.0, ended=number * 10.0 + 10) for number in range(60)]
    running = [trial(70 + worker, [], "running", began=700.0, worker=worker) for worker in range(2)]
    record = replace(record_of(*ended, *running), settings={"trials": 100})
    # 28 have not begun; the two that run have been running for five seconds.
    by_the_last = sorted(ended, key=lambda one: one.ended_at_s)[-50:]
    mean_s = sum(one.run_s for one in by_the_last) / 50
    assert time_left_s(record, 705.0) == pytest.approx((28 * mean_s + 2 * (mean_s - 5)) / 2)
    assert time_left_s(record_of(*ended), 705.0) is None
    assert time_left_s(record_of(*running), 705.0) is None
    repeated = replace(record, settings={"trials": 100, "repeats": 3, "repeat_best": 4})
    assert time_left_s(repeated, 705.0) == pytest.approx((40 * mean_s + 2 * (mean_s - 5)) / 2)
    assert " left" in drawn(record, now_s=705.0)


def test_the_last_improvement_is_told():
    said = drawn(record_of(trial(0, [2.0], ended=1.0), trial(1, [1.5], ended=2.0), trial(2, [1.9], ended=12.0)))
    assert "last improvement: trial 1, from 2 to 1.5, 10 s and 1 trial ago" in said
