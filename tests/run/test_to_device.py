"""Batches on their way to the device: when one is handed out, the next has begun. The GPU's part is in tests/gpu."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.run.to_device import one_ahead


@given(st.integers(0, 6))
def test_each_comes_once_and_the_next_has_begun(length):
    begun = []

    def begin(item):
        begun.append(item)
        return -item

    ended = []
    for item in one_ahead(iter(range(length)), begin, lambda half: -half):
        ended.append(item)
        assert begun == list(range(min(length, len(ended) + 1)))
    assert ended == begun == list(range(length))
