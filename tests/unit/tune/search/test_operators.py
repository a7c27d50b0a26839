"""Each operator against its definition."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import SettingError
from lockstep.tune.search import Choice, Float, Individual, Int, Proposal, Space
from lockstep.tune.search.algorithms import Evolving, propulate_operator
from lockstep.tune.search.operators import (
    Cascade,
    Conditional,
    CrossoverMultiple,
    CrossoverSigmoid,
    CrossoverUniform,
    InitUniform,
    IntervalMutation,
    PointMutation,
    RandomPointMutation,
    SelectMax,
    SelectMin,
    SelectTournament,
    SelectUniform,
)
from lockstep.tune.search.population import Population, rank_of

SPACE = Space.of({f"n{index}": Int(0, 4) for index in range(6)} | {"x": Float(-1, 1), "c": Choice("a", "b", "c", "d")})
seeds = st.integers(0, 2**32).map(np.random.default_rng)
losses = st.lists(st.floats(-9, 9) | st.just(math.inf) | st.just(math.nan), min_size=1, max_size=20)


def individuals(values, random=None):
    random = random or np.random.default_rng(0)
    return [Individual(number, SPACE.sample(random), (value,)) for number, value in enumerate(values)]


def population(values):
    found = Population()
    found.add(individuals(values))
    return found


@given(losses, st.integers(1, 25), seeds)
def test_selections_are_the_best_the_worst_and_any(values, count, random):
    known = population(values)
    finite = sorted(value for value in values if math.isfinite(value))
    assert [one.losses[0] for one in known.ranked] == finite, "NaN and infinity are never elite"
    for given_ in (known.ranked, list(known.ranked)):
        assert [one.losses[0] for one in SelectMin(count)(given_, random)] == finite[:count]
        assert [one.losses[0] for one in SelectMax(count)(given_, random)] == finite[::-1][:count]
        for selection in (SelectUniform(count), SelectTournament(count, size=3)):
            numbers = [one.number for one in selection(given_, random)]
            assert len(set(numbers)) == len(numbers) == min(count, len(finite))


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(-9, 9), st.booleans()), max_size=60))
def test_a_population_is_what_was_added_and_not_removed(steps):
    known, expected = Population(), {}
    for number, loss, added in steps:
        if added:
            known.add([Individual(number, (0.0,), (loss,))])
            expected.setdefault(number, loss)
        else:
            known.remove([number])
            expected.pop(number, None)
    assert {one.number: one.losses[0] for one in known} == expected
    assert [one.number for one in known.ranked] == sorted(expected, key=lambda number: (expected[number], number))


def test_constraints_and_budgets_come_before_losses():
    order = [
        Individual(0, (), (5.0,)),
        Individual(1, (), (1.0,), budget=9),
        Individual(2, (), (0.0,), budget=3),
        Individual(3, (), (-9.0,), violation=0.5),
        Individual(4, (), (-9.0,), violation=math.nan),
        Individual(5, (), (math.nan,)),
    ]
    assert sorted(order, key=rank_of) == order


@given(seeds)
def test_a_crossover_takes_each_gene_from_a_parent(random):
    parents = individuals([1, 2, 3], random)
    for operator, count in ((CrossoverUniform(SPACE), 2), (CrossoverSigmoid(SPACE), 2), (CrossoverMultiple(SPACE), 3)):
        (child,) = operator(parents[:count], random)
        assert all(gene in {one.point[index] for one in parents} for index, gene in enumerate(child.point))
        assert set(child.parents) <= {0, 1, 2}


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_the_first_parent_gives_its_share_of_genes(share):
    space, random = Space.of({str(index): Float(0, 1) for index in range(5000)}), np.random.default_rng(0)
    parents = [Individual(0, (0.0,) * 5000, (1.0,)), Individual(1, (1.0,) * 5000, (2.0,))]
    (child,) = CrossoverUniform(space, contribution=share)(parents, random)
    assert np.mean(child.point) == pytest.approx(1 - share, abs=0.03)


@given(st.floats(-50, 50), st.floats(-50, 50), st.floats(0.1, 9))
def test_the_better_of_two_gives_more_by_the_sigmoid_of_their_difference(one, other, temperature):
    crossover = CrossoverSigmoid(SPACE, temperature)
    share = crossover.better_share(*sorted(individuals([one, other]), key=rank_of))
    assert share == pytest.approx(1 / (1 + math.exp(-abs(one - other) / temperature)))
    assert 0.5 <= share <= 1


@given(seeds, st.integers(1, 9))
def test_a_point_mutation_changes_at_most_so_many_genes(random, points):
    (parent,) = individuals([1], random)
    (child,) = PointMutation(SPACE, points)([parent], random)
    assert sum(a != b for a, b in zip(parent.point, child.point, strict=True)) <= min(points, len(SPACE))
    (child,) = RandomPointMutation(SPACE, 1, points)([parent], random)
    assert sum(a != b for a, b in zip(parent.point, child.point, strict=True)) <= points
    assert child.parents == (0,)


def test_a_point_mutation_reaches_every_value_of_a_choice_behind_other_genes():
    random = np.random.default_rng(0)
    (parent,) = individuals([1], random)
    reached = {SPACE.params(PointMutation(SPACE)([parent], random)[0].point)["c"] for _ in range(400)}
    assert reached == {"a", "b", "c", "d"}


def test_an_interval_mutation_moves_a_float_by_its_sigma_and_stays_inside():
    random, middle = np.random.default_rng(0), Individual(0, SPACE.snap((0,) * 6 + (0.5, 0)), (1.0,))
    moved = [IntervalMutation(SPACE, sigma=0.1)([middle], random)[0].point for _ in range(2000)]
    assert all(point[:6] == middle.point[:6] and point[7] == 0 for point in moved)
    assert np.std([point[6] for point in moved]) == pytest.approx(0.1, rel=0.1)
    far = [IntervalMutation(SPACE, sigma=9.0)([middle], random)[0].point[6] for _ in range(50)]
    assert {0.0, 1.0} <= set(far)
    assert all(0 <= place <= 1 for place in far)


@given(seeds)
def test_with_probability_zero_the_first_goes_through(random):
    parents = individuals([1, 2], random)
    for operator in (
        CrossoverUniform(SPACE, probability=0), CrossoverMultiple(SPACE, probability=0),
        CrossoverSigmoid(SPACE, probability=0), PointMutation(SPACE, probability=0),
        RandomPointMutation(SPACE, probability=0), IntervalMutation(SPACE, probability=0), InitUniform(SPACE, 0),
    ):  # fmt: skip
        assert operator(parents, random) == [parents[0]]


def test_a_cascade_is_one_after_another_and_its_parts_fit():
    random, known = np.random.default_rng(0), population([3, 1, 2, 9])
    (child,) = Cascade(SelectMin(2), CrossoverUniform(SPACE), PointMutation(SPACE))(known.ranked, random)
    assert set(child.parents) <= {1, 2}
    assert child.operator == "crossover + point mutation"
    with pytest.raises(SettingError, match="gives 3, but"):
        Cascade(SelectMin(3), CrossoverUniform(SPACE))
    with pytest.raises(SettingError, match="give it operators"):
        Cascade()
    with pytest.raises(SettingError, match="end with one that gives one"):
        Evolving(SelectMin(3))


def test_a_conditional_asks_how_many_there_are():
    operator = Conditional(3, SelectMin(1), InitUniform(SPACE))
    random = np.random.default_rng(0)
    assert isinstance(operator(population([1, 2]).ranked, random)[0], Proposal)
    assert operator(population([2, 1, 3]).ranked, random)[0].number == 1


def test_propulates_default_has_its_frequencies():
    """Of 3000 children: 10 % uniform; else 40 % a resampled gene, always a Float moved by 5 %; of the 4 best only."""
    random, known = np.random.default_rng(0), population(range(12))
    operator = propulate_operator(SPACE, 4)
    children = [operator(known.ranked, random)[0] for _ in range(3000)]
    assert np.mean([child.operator == "uniform" for child in children]) == pytest.approx(0.1, abs=0.02)
    bred = [child for child in children if child.operator != "uniform"]
    assert np.mean(["point mutation" in child.operator for child in bred]) == pytest.approx(0.4, abs=0.03)
    assert all("interval mutation" in child.operator for child in bred)
    assert {number for child in bred for number in child.parents} == {0, 1, 2, 3}
    fewer = propulate_operator(SPACE, 13)
    assert all(fewer(known.ranked, random)[0].operator == "uniform" for _ in range(20))
