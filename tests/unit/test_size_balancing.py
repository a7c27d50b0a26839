"""Who owns what is not divided: everything has one owner, and no owner has much more than another."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.size_balancing import owners_of


@given(st.lists(st.integers(0, 1000), max_size=40), st.lists(st.integers(0, 500), min_size=1, max_size=6))
def test_everything_has_one_owner_and_the_loads_are_even(sizes, before):
    owners, loads = owners_of(sizes, before)
    assert len(owners) == len(sizes)
    assert loads == [
        load + sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        for rank, load in enumerate(before)
    ]
    if sizes:
        even = max(sum(loads) / len(loads), *before)
        assert max(loads) <= even + max(sizes)
