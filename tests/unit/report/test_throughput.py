import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.report import Throughput


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def drive(steps, *, step_s, samples=32, pauses=(), first=0):
    """A pace that saw steps of ``step_s`` seconds, with pauses of so many seconds before some of them."""
    clock, done = Clock(), first
    pace = Throughput(now=clock)
    pace.observe(done)
    for step in range(steps):
        clock.now_s += step_s + dict(pauses).get(step, 0.0)
        done += samples
        pace.observe(done)
    return pace


def test_nothing_is_known_before_an_interval():
    pace = Throughput(now=Clock())
    pace.observe(0)
    pace.observe(10)
    assert pace.samples_per_s is None
    assert pace.eta_s(100) is None


@given(
    step_s=st.floats(1e-3, 1e3),
    samples=st.integers(1, 10_000),
    first=st.integers(0, 10**9),
    left=st.integers(0, 10**9),
)
def test_a_steady_run_is_told_as_it_is(step_s, samples, first, left):
    pace = drive(max(3, int(2 / step_s)), step_s=step_s, samples=samples, first=first)
    assert pace.samples_per_s == pytest.approx(samples / step_s, rel=0.01)
    assert pace.eta_s(left) == pytest.approx(left * step_s / samples, rel=0.01)


@given(step_s=st.floats(0.3, 10), at=st.integers(1, 39), pause=st.floats(20, 1e6))
def test_one_pause_of_any_length_changes_nothing(step_s, at, pause):
    pace = drive(40, step_s=step_s, pauses=[(at, pause * step_s)])
    assert pace.samples_per_s == pytest.approx(32 / step_s)
    assert pace.eta_s(3200) == pytest.approx(100 * step_s)


def test_pauses_that_recur_are_in_the_time_left_but_not_in_the_speed():
    evaluations = [(at, 20.0) for at in range(10, 100, 10)]
    pace = drive(100, step_s=1.0, pauses=[*evaluations, (55, 8 * 3600.0)])
    assert pace.samples_per_s == pytest.approx(32)
    assert pace.eta_s(32 * 100) == pytest.approx(100 + 10 * 20.0)  # the suspended night counts like one of them


def test_a_change_for_good_becomes_the_speed():
    clock = Clock()
    pace = Throughput(now=clock)
    for step in range(200):
        pace.observe(step * 32)
        clock.now_s += 1.0 if step < 60 else 10.0
    assert pace.samples_per_s == pytest.approx(3.2)


def test_a_count_that_falls_starts_over():
    clock = Clock()
    pace = Throughput(now=clock)
    for samples in (5000, 5032, 4000, 4032, 4064):
        clock.now_s += 1.0
        pace.observe(samples)
    assert pace.samples_per_s == pytest.approx(32)
