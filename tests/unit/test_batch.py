"""Laws of the plan: nobody else divides batch sizes."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lockstep.batch import DEFAULT_MICRO_BATCHES, BatchPlan
from lockstep.errors import PlanError
from lockstep.formatting import plural


@st.composite
def plans(draw):
    global_batch = draw(st.integers(1, 600))
    micro_batch = draw(st.integers(1, global_batch))
    world_size = draw(st.integers(1, -(-global_batch // micro_batch)))
    in_turn = draw(st.sampled_from([n for n in range(1, world_size + 1) if world_size % n == 0]))
    return BatchPlan(global_batch, micro_batch, world_size, in_turn=in_turn)


@given(plans(), st.data())
def test_each_micro_batch_is_computed_by_exactly_one_rank(plan, data):
    m = data.draw(st.integers(0, plan.micro_batches))
    runs = [plan.run(rank, m) for rank in range(plan.world_size)]
    indices = [index for run in runs for index in run]
    assert (indices if plan.in_turn == 1 else sorted(indices)) == list(range(m))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    assert [index for rank in range(plan.world_size) for index in plan.block(rank, m)] == list(range(m))


@given(plans(), st.data())
def test_the_micro_batches_of_a_turn_are_neighbours_and_turns_follow_each_other(plan, data):
    m = data.draw(st.integers(0, plan.micro_batches))
    turns = -(-m // plan.world_size)
    for first in range(0, plan.world_size, plan.in_turn):
        runs = [plan.run(rank, m) for rank in range(first, first + plan.in_turn)]
        by_turn = [run[turn - turns + len(run)] for turn in range(turns) for run in runs if turn >= turns - len(run)]
        assert by_turn == sorted(index for run in runs for index in run)
        assert by_turn == list(range(by_turn[0], by_turn[-1] + 1)) if by_turn else True


@given(plans())
def test_in_a_full_step_every_rank_has_work(plan):
    assert all(len(plan.run(rank)) >= 1 for rank in range(plan.world_size))


def sizes(plan, samples):
    """Samples of each micro-batch of the steps of an epoch, step by step."""
    steps = plan.epoch(samples)
    return [
        [plan.position(step, steps.step_samples(step), index, last=False).samples for index in range(micro_batches)]
        for step, micro_batches in enumerate(map(steps.micro_batches_of, range(len(steps))))
    ]


@given(plans(), st.integers(0, 1300))
def test_micro_batches_hold_each_sample_once(plan, samples):
    *full, last = [*sizes(plan, samples)] or [[]]
    assert sum(map(sum, full)) + sum(last) == samples
    assert all(sum(step) == plan.global_batch and len(step) == plan.micro_batches for step in full)
    for step in (*full, last):
        assert all(size == plan.micro_batch for size in step[:-1])
        assert all(1 <= size <= plan.micro_batch for size in step)


@given(plans(), st.data())
def test_each_micro_batch_knows_what_a_run_of_its_step_holds(plan, data):
    samples = data.draw(st.integers(1, plan.global_batch))
    held = [plan.position(0, samples, index, last=False) for index in range(plan.micro_batches_of(samples))]
    run = plan.run(data.draw(st.integers(0, plan.world_size - 1)), len(held))
    place = data.draw(st.sampled_from(held))
    assert place.samples_in(run) == sum(held[index].samples for index in run)
    assert place.of_step(7) == plan.position(7, samples, place.index, last=False)


@given(plans(), st.integers(1, 600))
def test_micro_batches_do_not_depend_on_the_ranks(plan, world_size):
    other = BatchPlan(plan.global_batch, plan.micro_batch, world_size)
    assert sizes(other, 2 * plan.global_batch) == sizes(plan, 2 * plan.global_batch)


@given(plans(), st.integers(0, 5000))
def test_steps_cover_the_epoch(plan, samples):
    steps, whole = plan.steps(samples), plan.steps(samples, drop_last=True)
    assert (steps - 1) * plan.global_batch < samples <= steps * plan.global_batch or samples == steps == 0
    assert 0 <= samples - whole * plan.global_batch < plan.global_batch


@given(st.integers(1, 3000), st.integers(1, DEFAULT_MICRO_BATCHES))
def test_the_default_fits_a_machine_of_eight_devices_where_it_can(global_batch, world_size):
    plan = BatchPlan.of(global_batch, None, 1)
    assert 1 <= plan.micro_batches <= DEFAULT_MICRO_BATCHES
    if global_batch % DEFAULT_MICRO_BATCHES == 0:
        assert BatchPlan.of(global_batch, None, world_size).micro_batches == DEFAULT_MICRO_BATCHES


@given(st.integers(1, 300), st.integers(1, 300), st.data())
def test_what_the_message_proposes_is_accepted(global_batch, micro_batch, data):
    assume(micro_batch <= global_batch)
    world_size = data.draw(st.integers(-(-global_batch // micro_batch) + 1, 400))
    with pytest.raises(PlanError) as refused:
        BatchPlan(global_batch, micro_batch, world_size).require_work_for_all_ranks()
    if fits := global_batch // world_size:
        assert f"use micro_batch={fits} or less" in str(refused.value)
        for size in range(1, fits + 1):
            BatchPlan(global_batch, size, world_size).require_work_for_all_ranks()
    else:
        assert f"start at most {plural(global_batch, 'rank')}" in str(refused.value)
        BatchPlan(global_batch, 1, global_batch).require_work_for_all_ranks()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1, 1), "global_batch=0: it must be at least 1"),
        ((8, 0, 1), "micro_batch=0: it must be at least 1"),
        ((8, 2, 0), "world_size=0: it must be at least 1"),
        ((8, 9, 1), "micro_batch=9 is larger than global_batch=8"),
        ((8, 4, 3), "3 ranks for 2 micro-batches (global_batch=8, micro_batch=4)"),
        ((8, 8, 2), "2 ranks for 1 micro-batch (global_batch=8, micro_batch=8)"),
        ((8, 8, 2), "use micro_batch=4 or less, or 1 rank or fewer"),
        ((8, 4, 9), "raise global_batch to 9 or more"),
        ((8, 4, 9, True), "the largest batch is of 8, micro_batch=4"),
        ((8, 4, 9, True), "start at most 8 ranks, or make larger batches"),
    ],
)
def test_sizes_that_do_not_fit(arguments, words):
    with pytest.raises(PlanError) as refused:
        BatchPlan(*arguments).require_work_for_all_ranks()
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (BatchPlan(256, 32, 4), "256 samples/step = 8 micro-batches x 32 = 4 ranks x 2"),
        (BatchPlan(256, 32, 3), "256 samples/step = 8 micro-batches x 32 = 3 ranks x 2..3"),
        (BatchPlan(10, 4, 1), "10 samples/step = 3 micro-batches x 4 (the last 2) = 1 rank x 3"),
        (BatchPlan(10, 4, 1, varies=True), "up to 10 samples/step = 3 micro-batches x 4 (the last 2) = 1 rank x 3"),
        (BatchPlan(2, 1, 3), "2 samples/step = 2 micro-batches x 1 = 3 ranks x 0..1"),
        (BatchPlan(5, 5, 1), "5 samples/step = 1 micro-batch x 5 = 1 rank x 1"),
    ],
)
def test_a_plan_says_itself(plan, words):
    assert str(plan) == words
