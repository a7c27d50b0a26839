"""Lists as Slurm writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.slurm_syntax import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("n[01-03,7]", "n01 n02 n03 n7"),
        ("gpu[1-2]-ib,login", "gpu1-ib gpu2-ib login"),
        ("r[1-2]n[09-10]", "r1n09 r1n10 r2n09 r2n10"),
        ("n[099-101]", "n099 n100 n101"),
    ],
)
def test_a_list_of_hosts_is_expanded(hosts, names):
    assert expand_hosts(hosts) == names.split()


@pytest.mark.parametrize("hosts", ["", "n[1", "n1]", "n[a-b]", "n[]", "n1,,n2"])
def test_what_is_no_list_of_hosts_is_refused(hosts):
    with pytest.raises(ValueError, match="not a "):
        expand_hosts(hosts)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 4))
def test_a_range_names_each_host_once(first, more, width):
    names = expand_hosts(f"n[{first:0{width}d}-{first + more:0{width}d}]")
    assert [int(name[1:]) for name in names] == list(range(first, first + more + 1))
    assert all(len(name) > width for name in names)


@pytest.mark.parametrize(("counts", "each"), [("8", [8]), ("2(x3),1", [2, 2, 2, 1]), ("4, 4", [4, 4])])
def test_counts_are_one_for_each_node(counts, each):
    assert expand_counts(counts) == each


@pytest.mark.parametrize("counts", ["", "2(x)", "x3", "1,,2", "2x3"])
def test_what_is_no_list_of_counts_is_refused(counts):
    with pytest.raises(ValueError, match="not a list of counts"):
        expand_counts(counts)
