"""Laws of the simulated step, and cases that were calculated by hand."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import PlanError, SettingError
from lockstep.scale import SimulatedStrategy, System, open_catalogue, simulate
from lockstep.scale.links import Curve, Link
from lockstep.scale.simulator import PARTS, TwoLanes, alone_s, slowest_of
from lockstep.scale.step_profile import MIB, GradientReady, LinkProfile, buckets_of
from lockstep.strategy_kinds import BUILT_IN
from profiles import profile

GPU = open_catalogue().gpu("A100")
WAYS = sorted(set(BUILT_IN) - {"none", "auto"})


def link(gbs=1.0, latency=0.0, place="between", error=0.1, **more):
    return Link("test", place, gbs * 1e9, latency, 0.0, 2, "a test", error, **more)


def system(nodes=2, each=1, gbs=1.0, latency=0.0, within=None, **more):
    return System(GPU, nodes, each, within or link(50, place="within"), link(gbs, latency), **more)


def ddp(bucket=25 * MIB, **more):
    return SimulatedStrategy("ddp", reduction="fast", bucket_bytes=bucket, **more)


profiles = st.builds(
    profile,
    gradients=st.integers(1, 40),
    size=st.integers(1_000, 20_000_000),
    forward=st.floats(0.001, 1.0),
    backward=st.floats(0.001, 1.0),
    optimizer=st.floats(0.0, 0.1),
    cv=st.floats(0.0, 0.1),
    micro_batches=st.integers(1, 8),
)
systems = st.builds(
    system,
    nodes=st.sampled_from([1, 2, 4]),
    each=st.sampled_from([1, 2, 8]),
    gbs=st.floats(0.01, 100),
    latency=st.floats(0, 0.001),
    contention=st.floats(0, 0.5),
    fixed_s=st.floats(0, 0.01),
)


@settings(max_examples=40)
@given(profiles, st.sampled_from(WAYS))
def test_one_rank_takes_what_the_profile_took(step, way):
    found = simulate(step, system(nodes=1), SimulatedStrategy.parse(way))
    assert found.seconds == pytest.approx(alone_s(step))
    assert found.sent_bytes == 0
    assert found.low <= found.seconds <= found.high


@settings(max_examples=40)
@given(profiles, systems, st.sampled_from(WAYS))
def test_parts_are_the_whole_and_the_interval_holds_it(step, where, way):
    try:
        found = simulate(step, where, SimulatedStrategy.parse(way))
    except PlanError:
        return
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert set(found.parts) == set(PARTS)
    assert found.low <= found.seconds <= found.high
    assert found.seconds > 0


@settings(max_examples=40)
@given(profiles, systems, st.sampled_from(sorted(set(WAYS) - {"dp"})))
def test_a_faster_link_is_never_slower(step, where, way):
    faster = replace(where, within=where.within.scaled(2), between=where.between.scaled(2))
    strategy = SimulatedStrategy.parse(way)
    try:
        slow, fast = simulate(step, where, strategy), simulate(step, faster, strategy)
    except PlanError:
        return
    assert fast.seconds <= slow.seconds * (1 + 1e-9)


@settings(max_examples=40)
@given(profiles, systems, st.floats(0.1, 100))
def test_ddp_is_never_faster_than_its_bounds(step, where, bucket):
    """T_n >= T_f + T_b + T_ar(S_last) where nothing is left to hide it, and T_f + r_1 + the sum of all T_ar."""
    if where.ranks == 1:
        return
    limit = bucket * MIB
    found = simulate(step, where, ddp(limit))
    buckets = buckets_of(step.gradients, limit)
    passes = step.forward.median_s + step.backward.median_s
    earlier = (step.micro_batches - 1) * passes + step.forward.median_s + step.optimizer.median_s
    moving = [where.all_reduce_s(one.bytes) for one in buckets]
    assert found.seconds >= earlier + step.backward.median_s - 1e-9
    assert found.seconds >= earlier + buckets[0].ready_s + sum(moving) - 1e-9
    assert found.seconds >= earlier + min(buckets[-1].ready_s, step.backward.median_s) + moving[-1] - 1e-9
    # Nor slower than without any overlap.
    slowest = earlier + (step.backward.median_s + sum(moving)) * (1 + where.contention)
    assert found.seconds - found.parts["waiting"] - found.parts["fixed"] <= slowest + 1e-9


@settings(max_examples=40)
@given(profiles, systems)
def test_one_flat_bucket_hides_nothing(step, where):
    if where.ranks == 1:
        return
    found = simulate(step, where, ddp(float("inf")))
    whole = sum(gradient.bytes for gradient in step.gradients)
    assert found.parts["communication"] == pytest.approx(where.all_reduce_s(whole))


@settings(max_examples=40)
@given(profiles, systems)
def test_half_of_the_bytes_are_never_slower(step, where):
    if where.ranks == 1:
        return
    halves = tuple(replace(one, bytes=max(1, one.bytes // 2)) for one in step.gradients)
    flat = ddp(float("inf"))
    assert simulate(replace(step, gradients=halves), where, flat).seconds <= simulate(step, where, flat).seconds + 1e-12


@settings(max_examples=40)
@given(profiles, st.integers(1, 6))
def test_more_contention_is_never_faster(step, twice):
    calm, busy = system(contention=0.1 * twice), system(contention=0.2 * twice)
    assert simulate(step, calm, ddp()).seconds <= simulate(step, busy, ddp()).seconds + 1e-12


@settings(max_examples=40)
@given(st.lists(st.integers(1, 10 * MIB), min_size=1, max_size=60), st.floats(0.1, 30))
def test_buckets_hold_each_gradient_once_in_order_and_close_when_they_reach_the_limit(sizes, mib):
    gradients = [GradientReady(f"g{n}", size, n / 10) for n, size in enumerate(sizes)]
    buckets = buckets_of(gradients, mib * MIB, MIB)
    assert sum(one.bytes for one in buckets) == sum(sizes)
    assert sum(one.gradients for one in buckets) == len(sizes)
    first = 0
    for number, bucket in enumerate(buckets):
        held = sizes[first : first + bucket.gradients]
        limit = MIB if number == 0 else mib * MIB
        assert bucket.bytes == sum(held)
        assert sum(held[:-1]) < limit
        assert bucket.bytes >= limit or number == len(buckets) - 1
        first += bucket.gradients
        assert bucket.ready_s == (first - 1) / 10


def test_ddp_lays_its_buckets_out_like_this():
    """Torch's own rule: compute_bucket_assignment_by_size on the order in which gradients are ready."""
    torch = pytest.importorskip("torch")
    numbers = [100_000, 300_000, 50_000, 900_000, 2_000_000, 10_000, 700_000]
    tensors = [torch.empty(number) for number in numbers]
    limits = [MIB, 4 * MIB]
    indices, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, limits, [False] * len(tensors))
    gradients = [GradientReady("", 4 * number, 0.0) for number in numbers]
    assert [one.gradients for one in buckets_of(gradients, 4 * MIB, MIB)] == [len(one) for one in indices]


def test_by_hand():
    """Two equal gradients of 100 MB over 1 GB/s between 2 ranks: 0.1 s each; ready at 0.1 and 0.2 of 0.2 s."""
    step = profile(gradients=2, size=100_000_000)
    found = simulate(step, system(gbs=1.0), ddp(1.0))
    assert found.transfers == (pytest.approx((0.1, 0.2)), pytest.approx((0.2, 0.3)))
    assert found.parts["communication"] == pytest.approx(0.1)
    assert found.seconds == pytest.approx(0.31 + 0.1)
    assert found.sent_bytes == 200_000_000
    flat = simulate(step, system(gbs=1.0), ddp(1e9))
    assert flat.seconds == pytest.approx(0.31 + 0.2)


def test_by_hand_where_computing_is_slower_while_data_moves():
    lanes = TwoLanes(contention=0.5)
    assert lanes.compute(1.0) == 1.0
    assert lanes.move(3.0, after=1.0) == 4.0
    # From 1 to 4 two of its three seconds' work are done, and the third one after that.
    assert lanes.compute(3.0) == pytest.approx(5.0)
    assert lanes.compute(1.0) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("spec", "added"),
    [
        ("ddp:compress=fp16", 0.1),  # half of the bytes, nothing hidden in one bucket
        ("local-sgd:period=4", 0.05),
        ("diloco:period=10", 0.02),
        ("diloco:period=10,wire=bf16", 0.01),
        ("diloco:period=10,fragments=2,overlap=1", 0.0),
        ("parameter-server:servers=1", 0.4),
        ("pipeline:stages=2", 0.0),
    ],
)
def test_strategies_by_hand(spec, added):
    """200 MB over 1 GB/s between 2 ranks: an all-reduce takes 0.2 s."""
    step = profile(gradients=1, size=200_000_000)
    strategy = replace(SimulatedStrategy.parse(spec, reduction="fast"), bucket_bytes=1e12)
    found = simulate(step, system(gbs=1.0), strategy)
    cast = found.parts["compression"]
    assert found.seconds - cast == pytest.approx(0.31 + added)


def test_fsdp_sends_half_more_than_ddp():
    step, where = profile(gradients=48), system(nodes=4)
    sharded = simulate(step, where, SimulatedStrategy.parse("fsdp", reduction="fast"))
    assert sharded.sent_bytes == pytest.approx(1.5 * simulate(step, where, ddp()).sent_bytes)


def test_an_exact_sum_sends_more_only_where_a_rank_holds_several_nodes_of_the_tree():
    exact = SimulatedStrategy("ddp", reduction="exact")
    for nodes, micro_batches, times in ((2, 1, 1.0), (2, 3, 1.0), (4, 4, 1.0), (3, 2, 1.5)):
        step, where = profile(micro_batches=micro_batches), system(nodes=nodes)
        sent = simulate(step, where, exact).sent_bytes / simulate(step, where, ddp()).sent_bytes
        assert sent == pytest.approx(times), (nodes, micro_batches)


def test_dp_loads_for_all_in_one_process_and_pipelines_have_bubbles():
    step = profile(data=0.05)
    one_node = system(nodes=1, each=4)
    assert simulate(step, one_node, SimulatedStrategy.parse("dp")).parts["input"] == pytest.approx(3 * 0.05)
    # Four stages, two micro-batches: (p - 1) / m of a stage's share are lost.
    two = profile(micro_batches=2)
    found = simulate(two, one_node, SimulatedStrategy.parse("pipeline:stages=4"))
    assert found.seconds == pytest.approx(alone_s(two) / 4 * (1 + 3 / 2))
    assert found.samples == 64


@pytest.mark.parametrize(("spec", "nodes"), [("none", 2), ("dp", 2), ("pipeline:stages=3", 4), ("hsdp:shard=3", 4)])
def test_what_cannot_be_is_refused(spec, nodes):
    with pytest.raises(PlanError, match=str(nodes)):
        simulate(profile(), system(nodes=nodes), SimulatedStrategy.parse(spec))


def test_tensor_groups_are_measured_and_not_predicted():
    assert SimulatedStrategy.parse("fsdp:tensor=1").name == "fsdp"
    with pytest.raises(SettingError, match="lockstep bench"):
        SimulatedStrategy.parse("fsdp:tensor=2")


def test_the_slowest_of_many_is_awaited():
    assert slowest_of(1) == 0
    assert slowest_of(2) == pytest.approx(0.589, abs=0.03)  # exactly 1 / sqrt(pi) = 0.564
    assert slowest_of(100) == pytest.approx(2.508, abs=0.02)
    calm, uneven = profile(), profile(cv=0.05)
    assert simulate(uneven, system(nodes=8), ddp()).seconds > simulate(calm, system(nodes=8), ddp()).seconds


def test_input_limits_what_a_node_can_do():
    limited = system(nodes=2, each=4, node_samples_per_s=100.0, gbs=100)
    found = simulate(profile(), limited, ddp())
    assert found.samples_per_s == pytest.approx(200)
    assert found.parts["input"] > 0


# Links -----------------------------------------------------------------------------------------------------------

ascending = st.lists(st.integers(1, 10**9), min_size=2, max_size=10, unique=True).map(sorted)


@settings(max_examples=40)
@given(ascending, st.data())
def test_a_curve_goes_through_what_was_measured_and_never_falls(sizes, data):
    times = sorted(data.draw(st.lists(st.floats(1e-6, 1), min_size=len(sizes), max_size=len(sizes))))
    curve = Curve(2, tuple(map(float, sizes)), tuple(times))
    for size, time in zip(sizes, times, strict=True):
        assert curve.at(size) == pytest.approx(time)
    asked = sorted(data.draw(st.lists(st.floats(1, 1e10), min_size=2, max_size=5)))
    found = [curve.at(size) for size in asked]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(found))


@settings(max_examples=40)
@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=10))
def test_noise_that_falls_is_averaged_away(times):
    curve = Curve(2, tuple(map(float, range(1, len(times) + 1))), tuple(times))
    assert all(a <= b for a, b in itertools.pairwise(curve.seconds))
    assert sum(curve.seconds) == pytest.approx(sum(times))
    assert Curve(2, curve.sizes, curve.seconds).seconds == curve.seconds


def test_a_measured_link_is_what_was_measured():
    measured = LinkProfile(2, 2, "gloo", (1_000, 1_000_000, 10_000_000), (0.001, 0.011, 0.101))
    where = system(nodes=2)
    where = replace(where, between=Link.measured(measured, "between"))
    for size, time in zip(measured.bytes, measured.seconds, strict=True):
        assert where.all_reduce_s(size) == pytest.approx(time)
    # Four ranks on each of the two nodes: what passes within a node is in what was measured.
    where = system(nodes=2, each=4)
    eight = replace(measured, ranks=8)
    where = replace(where, between=Link.measured(eight, "between", within_s=where.within.floor_s(4)))
    for size, time in zip(eight.bytes, eight.seconds, strict=True):
        assert where.all_reduce_s(size) == pytest.approx(time, rel=1e-3)


@settings(max_examples=30)
@given(st.sampled_from(sorted(open_catalogue().links)), st.floats(1e4, 1e10), st.integers(2, 512))
def test_links_of_the_catalogue_are_slower_for_more_bytes_and_more_ranks(name, size, ranks):
    known = open_catalogue().links[name]

    def time(size, ranks):
        return known.floor_s(ranks) + known.volume_s(size, ranks)

    assert 0 < time(size, ranks) <= time(2 * size, ranks)
    assert time(size, ranks) <= time(size, 2 * ranks) * (1 + 1e-9)
    assert known.source


def test_small_sums_of_curves_that_the_catalogue_does_not_know():
    """Below 100 kB, within 20 % of what was measured."""
    from small_sums import errors

    found = errors()
    assert [len(points) for points in found.values()] == [2, 2, 2, 12]
    assert all(abs(error) < 0.2 for points in found.values() for _, _, error in points)


@given(st.sampled_from(sorted(open_catalogue().links)), st.floats(1, 1e6), st.floats(1, 1e6), st.integers(2, 64))
def test_smaller_sums_take_no_longer(name, one, other, ranks):
    known, (small, large) = open_catalogue().links[name], sorted((one, other))
    assert 0 < known.floor_s(ranks, small) <= known.floor_s(ranks, large) <= known.floor_s(ranks)
