"""The search for a batch that fits and for what is fastest."""

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from lockstep.scale.find_setting import BUCKETS_MB, Try, best_of, find_among, find_batch, report, worker_counts


class Memory:
    """Runs out above ``most``; speed grows until ``fast`` samples."""

    def __init__(self, most, fast):
        self.most, self.fast, self.tried = most, fast, []

    def __call__(self, value):
        self.tried.append(value)
        if value > self.most:
            return Try(value, None, True, "OutOfMemoryError")
        return Try(value, float(min(value, self.fast)))


@given(st.integers(1, 512), st.integers(0, 3000), st.integers(1, 4000))
def test_the_batch_that_is_found_fits_and_a_little_more_would_not(first, most, fast):
    attempt = Memory(most, fast)
    found = find_batch(first, attempt)
    assert len(attempt.tried) == len(set(attempt.tried)), "the same batch twice"
    assert len(attempt.tried) < 40
    if most == 0:
        assert found.best is None
        assert found.largest is None
        return
    assert found.largest <= most
    assert found.best.value <= most
    out = [t.value for t in found.tries if t.out_of_memory]
    if out:
        assert min(out) - found.largest <= max(1, found.largest // 8)
    else:  # it stopped because nothing was gained any more
        assert found.best.samples_per_s >= 0.98 * max(t.samples_per_s for t in found.tries)


@given(st.lists(st.none() | st.floats(0.001, 1000), min_size=1, max_size=8))
def test_the_best_is_the_smallest_of_those_that_are_as_fast(speeds):
    tries = [Try(n, speed) for n, speed in enumerate(speeds)]
    best, known = best_of(tries), [speed for speed in speeds if speed is not None]
    assert (best is None) == (not known)
    if best is not None:
        assert best.samples_per_s >= 0.98 * max(known)
        assert all(
            t.samples_per_s is None or t.samples_per_s < 0.98 * max(known) for t in tries if t.value < best.value
        )


@given(st.lists(st.integers(0, 20), min_size=1, unique=True), st.integers(1, 5), st.data())
def test_values_take_turns_and_the_median_counts(values, rounds, data):
    speeds = {v: data.draw(st.lists(st.floats(1, 9), min_size=rounds, max_size=rounds)) for v in values}
    fails = {v: data.draw(st.integers(0, 2 * rounds)) for v in values}
    tried = []

    def attempt(value):
        number = tried.count(value)
        tried.append(value)
        return Try(value, None if number == fails[value] else speeds[value][number])

    found = find_among("workers", values, attempt, rounds)
    for each in found.tries:
        failed = fails[each.value] < rounds
        assert tried.count(each.value) == (fails[each.value] + 1 if failed else rounds)
        assert each.samples_per_s == (None if failed else median(speeds[each.value]))
    assert tried[: len(values)] == sorted(values)


def test_values_are_tried_once_each_and_told():
    tried = []
    found = find_among(
        "bucket", BUCKETS_MB, lambda value: tried.append(value) or Try(value, 100 - 4 * abs(value - 2.5))
    )
    assert tried == sorted(BUCKETS_MB)
    assert "best: --set bucket_mb=2.5" in "\n".join(report(found))
    assert worker_counts(6) == (0, 1, 2, 4)
    failed = find_among("workers", (0, 1), lambda value: Try(value, None, cause="ValueError: no " + "x" * 200))
    assert failed.best is None
    assert max(map(len, report(failed))) <= 80
