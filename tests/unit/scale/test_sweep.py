"""Which variants there are, how each is started, and in which order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.batch import BatchPlan
from lockstep.cli.bench import bench_options
from lockstep.errors import SettingError
from lockstep.scale.sweep import BatchSizes, Sweep, Variant, rounds_of, start_of
from lockstep.settings import parse

RANKS = st.lists(st.integers(1, 16), min_size=1, max_size=4).map(tuple)
SIZES = st.tuples(st.integers(1, 512), st.integers(1, 64)).map(lambda s: BatchSizes(s[0], min(s)))


@given(RANKS, st.sets(st.sampled_from(["ddp", "fsdp", "zero"]), min_size=1), st.sets(st.integers(1, 99), min_size=1))
def test_each_combination_comes_once(ranks, strategies, batches):
    found = Sweep(ranks, tuple(strategies), tuple(batches)).variants()
    assert len(found) == len(set(found)) == len(set(ranks)) * len(strategies) * len(batches)


@given(st.integers(1, 12), st.integers(1, 8))
def test_each_round_has_each_variant_once(number, rounds):
    variants = tuple(Variant("ddp", ranks) for ranks in range(1, number + 1))
    orders = rounds_of(variants, rounds)
    assert len(orders) == rounds
    assert all(sorted(order, key=lambda v: v.ranks) == list(variants) for order in orders)
    assert len({order[0] for order in orders}) >= min(2, number, rounds)


@given(
    st.integers(1, 16),
    SIZES,
    st.none() | st.integers(1, 512),
    st.sampled_from(["strong", "weak"]),
    st.sampled_from(["ddp", "fsdp", "dp"]),
)
def test_batches_grow_with_the_ranks_or_stay(ranks, sizes, batch, scaling, strategy):
    variant = Variant(strategy, ranks, batch)
    start = start_of(variant, Sweep((ranks,), (strategy,), scaling=scaling), sizes, on_gpu=False)
    whole, micro = int(start.settings["global_batch"]), int(start.settings["micro_batch"])
    assert whole == (batch or sizes.global_batch) * (ranks if scaling == "weak" else 1)
    assert start.ranks == (1 if strategy == "dp" else ranks)
    plan = BatchPlan(whole, micro, start.ranks)
    if whole >= start.ranks:
        plan.require_work_for_all_ranks()
    for name, value in start.settings.items():
        parse(name, value)
    if strategy == "dp":
        assert start.settings["strategy"] == f"dp:devices={ranks}"
        assert start.settings["rehearse"] == "true"


def test_without_sizes_the_script_keeps_its_own():
    start = start_of(Variant("ddp", 4, bucket_mb=2.5, workers=1), Sweep(), None, on_gpu=True)
    assert start.settings == {"strategy": "ddp", "bucket_mb": "2.5", "workers": "1"}
    with pytest.raises(SettingError, match="give --batch"):
        start_of(Variant("ddp", 4), Sweep(scaling="weak"), None, on_gpu=True)


@pytest.mark.parametrize("wrong", [{"ranks": (0,)}, {"strategies": ("pdd",)}, {"batches": ()}, {"workers": (-1,)}])
def test_what_cannot_be_varied_is_refused(wrong):
    with pytest.raises(SettingError):
        Sweep(**wrong)


@given(
    st.lists(st.integers(1, 99), min_size=1, max_size=4),
    st.lists(st.sampled_from(["ddp", "dp", "fsdp"]), min_size=1, max_size=3),
    st.lists(st.sampled_from(["--epochs", "3", "x.py", "--lr=0.1"]), max_size=4),
    st.permutations(["script", "ranks", "strategies"]),
)
def test_the_script_is_found_wherever_it_stands(ranks, strategies, own, order):
    words = {
        "script": ["examples/train.py"],
        "ranks": ["--ranks", *map(str, ranks)],
        "strategies": ["--strategies", *strategies],
    }
    line = [word for part in order for word in words[part]]
    parsed, unknown = bench_options().parse_known_args([*line, "--", *own])
    assert not unknown
    assert (parsed.script, parsed.args) == ("examples/train.py", own)
    assert (parsed.ranks, parsed.strategies) == (ranks, strategies)
