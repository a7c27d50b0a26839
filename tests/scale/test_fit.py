"""The largest micro-batch that fits: which are tried, and a run that is started with it."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.scale.fit import Peak, divisors, expected, largest


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_candidates_are_the_divisors(number, most):
    found = divisors(number, most)
    assert found == [one for one in range(1, number + 1) if one <= most and number % one == 0]


@given(st.lists(st.integers(1, 10**6), unique=True, max_size=60), st.integers(0, 10**6))
def test_the_largest_that_fits_is_found_by_few_tries(sizes, limit):
    sizes, asked = sorted(sizes), []

    def fits(size):
        asked.append(size)
        return size <= limit

    assert largest(sizes, fits) == max((size for size in sizes if size <= limit), default=None)
    assert len(asked) <= len(sizes).bit_length()


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.lists(st.integers(1, 512), min_size=2, max_size=5, unique=True))
def test_memory_that_grows_with_the_micro_batch_is_foreseen(stays, each, measured):
    peaks = [Peak(size, stays + each * size, 2 * (stays + each * size)) for size in measured]
    assert abs(expected(peaks, 1024) - 2 * (stays + each * 1024)) <= 2
    assert expected(peaks[:1], 2 * measured[0]) == 2 * peaks[0].all_ranks
    assert expected([], 8) == 0
