"""What is chosen, and that it is said."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.run import Run
from lockstep.strategies.replicated.auto import Choice, Link, choose, measure
from lockstep.testing import run_ranks

MB, GB = 10**6, 10**9


@pytest.mark.parametrize(
    ("parameters", "free", "ranks", "name"),
    [
        (20 * MB, 8 * GB, 4, "ddp"),
        (4 * GB, 16 * GB, 8, "zero"),  # 12 GB whole, 5 GB divided, 9.6 GB to use
        (4 * GB, 8 * GB, 8, "fsdp"),
        (4 * GB, 8 * GB, 1, "ddp"),  # there is nobody to divide with
    ],
)
def test_memory_decides(parameters, free, ranks, name):
    assert choose(parameters, free, ranks, None).name == name


sizes = st.integers(1, 10**12)


@given(sizes, sizes, st.integers(1, 64))
def test_more_memory_never_divides_more(parameters, free, ranks):
    order = ["ddp", "zero", "fsdp"]
    less, more = (order.index(choose(parameters, f, ranks, None).name) for f in (free, 2 * free))
    assert more <= less


@given(st.floats(1e-6, 1), st.floats(1e3, 1e12), sizes)
def test_buckets_are_of_a_size_that_can_be_used(latency, rate, size):
    assert 0.5 <= Link(latency, rate).bucket_mb(size) <= 25


def test_a_slow_link_has_small_buckets_and_is_told_of():
    slow, fast = (choose(20 * MB, 8 * GB, 2, Link(3e-4, rate)) for rate in (12.5e6, 12.5e9))
    assert (slow.name, fast.name) == ("ddp", "ddp")
    assert slow.bucket_mb < fast.bucket_mb
    assert "each computes something else" in slow.why
    assert "computes something else" not in fast.why
    assert "0.1 Gbit/s" in slow.why


def told_before_the_model():
    with Run(strategy="auto") as run:
        link = measure(run._context.group)
        with pytest.raises(Exception, match=r"call `model = run.model\(model\)` first"):
            run._context.strategy.state_layout  # noqa: B018 - it is asked, and refuses
        run.model(torch.nn.Linear(2, 2))
        return link, type(run._context.strategy.state_layout).__name__


def test_all_ranks_measure_the_same_link():
    one, other = run_ranks(told_before_the_model, 2)
    assert one == other
    assert one[0].rate > 0
    assert one[1] == "ReplicatedLayout"


def test_a_choice_says_why():
    assert choose(20 * MB, 8 * GB, 4, None) == Choice(
        "ddp", "gradients and Adam's moments take 57.2 MiB and 4.47 GiB can be used"
    )
