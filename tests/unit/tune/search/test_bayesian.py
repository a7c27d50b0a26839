"""The Gaussian process against its formulas, and what the default algorithm owes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.tune.search import Choice, Float, Individual, Int, Space, make_algorithm
from lockstep.tune.search.bayesian import EVOLUTION, FREE_S, MODELS, BayesianEvolution
from lockstep.tune.search.gaussian_process import GaussianProcess, Kernel, _density, _squares, log_expected_improvement

NUMBERS = np.zeros(3, dtype=bool)


def sample(count, genes=3, seed=0):
    random = np.random.default_rng(seed)
    points = random.random((count, genes))
    losses = np.sin(5 * points[:, 0]) + points[:, 1] ** 2 + 0.1 * random.normal(size=count)
    return points, (losses - losses.mean()) / losses.std()


def matern(one, other, lengths):
    distance = math.sqrt(5) * math.sqrt(
        sum(((a - b) / length) ** 2 for a, b, length in zip(one, other, lengths, strict=True))
    )
    return (1 + distance + distance**2 / 3) * math.exp(-distance)


def test_a_prediction_is_that_of_the_textbook():
    points, losses = sample(12)
    kernel = Kernel(np.log([0.3, 0.5, 2.0]), math.log(1e-3), NUMBERS)
    mean, deviation = GaussianProcess(kernel, points, losses, variance=2.0).predict(np.array([[0.2, 0.4, 0.6]]))
    between = np.array([[matern(one, other, (0.3, 0.5, 2.0)) for other in points] for one in points])
    across = np.array([matern((0.2, 0.4, 0.6), other, (0.3, 0.5, 2.0)) for other in points])
    solved = np.linalg.solve(between + (1e-3 + 1e-8) * np.eye(12), np.stack([losses, across], axis=1))
    assert mean[0] == pytest.approx(across @ solved[:, 0])
    assert deviation[0] == pytest.approx(math.sqrt(2.0 * (1 - across @ solved[:, 1])))


def test_two_values_of_a_choice_are_as_far_apart_as_any_two():
    kernel = Kernel(np.log([0.5, 0.5]), -8.0, np.array([False, True]))
    found = kernel.between(np.array([[0.2, 0.0]]), np.array([[0.2, 0.0], [0.2, 1.0], [0.2, 7.0]]))[0]
    assert found[0] == 1
    assert found[1] == found[2] == pytest.approx(matern((0.0,), (1.0,), (0.5,)))


@given(st.lists(st.floats(-2, 1), min_size=3, max_size=3), st.floats(-12, -1))
@settings(max_examples=25, deadline=None)
def test_the_gradient_is_that_of_the_density(lengths, noise):
    points, losses = sample(15)
    squares, theta = (
        _squares(points.T[:, :, None], points.T[:, None, :], NUMBERS[:, None, None]),
        np.array([*lengths, noise]),
    )
    gradient = _density(theta, squares, losses)[1]
    for index, step in enumerate(1e-5 * np.eye(4)):
        differs = _density(theta + step, squares, losses)[0] - _density(theta - step, squares, losses)[0]
        assert gradient[index] == pytest.approx(differs / 2e-5, rel=1e-3, abs=1e-3)


def test_a_gene_that_does_not_matter_gets_the_greatest_length():
    points, losses = sample(60)
    lengths = Kernel.fitted(points, losses, NUMBERS).lengths
    assert lengths[2] == lengths.max()
    assert Kernel.fitted(points, losses, NUMBERS).lengths.tolist() == lengths.tolist()


@given(st.floats(-3, 3), st.floats(0.01, 2), st.floats(-3, 3))
@settings(max_examples=50, deadline=None)
def test_the_expected_improvement_is_its_integral(mean, deviation, best):
    losses = np.linspace(mean - 12 * deviation, mean + 12 * deviation, 200_001)
    density = np.exp(-0.5 * ((losses - mean) / deviation) ** 2) / (deviation * math.sqrt(2 * math.pi))
    integral = np.trapezoid(np.maximum(best - losses, 0) * density, losses)
    found = log_expected_improvement(np.array([mean]), np.array([deviation]), best)[0]
    if (best - mean) / deviation > -5:
        assert math.exp(found) == pytest.approx(integral, rel=1e-3, abs=1e-12)
    assert found < log_expected_improvement(np.array([mean]), np.array([deviation]), best + 0.1)[0]


def test_supposed_losses_leave_the_means_and_take_the_doubt():
    points, losses = sample(20)
    process = GaussianProcess(Kernel.fitted(points, losses, NUMBERS), points, losses)
    places = np.array([[0.5, 0.5, 0.5], [0.9, 0.1, 0.5]])
    mean, deviation = process.predict(places)
    after, less = process.supposing(places).predict(places)
    assert after == pytest.approx(mean, abs=1e-3)
    assert (less < deviation).all()


SPACE = Space.of({"x": Float(-5, 5), "y": Float(-5, 5), "z": Float(-5, 5)})


def bowl(params):
    return (params["x"] - 1.7) ** 2 + (params["y"] + 2.2) ** 2 + 3 * (params["z"] - 3.1) ** 2


def run(algorithm, space, loss, count, *, trained_s=1e9, seed=0):
    """Evaluate so many; ``loss`` gives None for what fails. Returns all proposals, each with its loss."""
    found, failed, random = [], [], np.random.default_rng(seed)
    for number in range(count):
        algorithm.inform([], failed, trained_s)
        proposal = algorithm.propose(random)
        value = loss(space.params(proposal.point))
        found.append((proposal, value))
        if value is None:
            failed.append(proposal.point)
        else:
            algorithm.observe(
                [Individual(number, proposal.point, (value,), operator=proposal.operator, parents=proposal.parents)]
            )
    return found


@pytest.mark.parametrize("words", ["auto", "gp"])
def test_fifty_trials_find_the_bottom_of_a_bowl(words):
    reached = sorted(min(v for _, v in run(make_algorithm(words, SPACE), SPACE, bowl, 50, seed=s)) for s in range(3))
    assert reached[1] < 1e-2  # evolution: about 1


def test_what_runs_is_not_proposed_again():
    # Without `Distinct`, which changes whatever is proposed twice.
    algorithm = BayesianEvolution(SPACE, evolves=False, limited=False)
    run(algorithm, SPACE, bowl, 14)
    apart = []
    for seed in range(8):
        algorithm.inform([], [], 1e9)
        alone = algorithm.propose(np.random.default_rng(seed)).point
        algorithm.inform([alone], [], 1e9)
        apart.append(math.dist(alone, algorithm.propose(np.random.default_rng(seed)).point))
    assert min(apart) > 1e-3
    assert np.median(apart) > 1e-2


@pytest.mark.parametrize(("fails", "least"), [(lambda p: p["x"] < 0, 0.0), (lambda p: p["x"] > 0, 2.89)])
def test_where_trials_fail_few_more_are_tried(fails, least):
    found = run(make_algorithm("auto", SPACE), SPACE, lambda p: None if fails(p) else bowl(p), 60)
    assert min(value for _, value in found if value is not None) < least + 0.5
    if not least:  # else the best lies at the edge of what fails
        assert sum(value is None for _, value in found[-30:]) <= 6


def test_a_constraint_is_learnt_where_what_violates_it_has_better_losses():
    algorithm, random, found = make_algorithm("gp", SPACE), np.random.default_rng(0), []
    for number in range(60):
        algorithm.inform([], [], 1e9)
        proposal = algorithm.propose(random)
        params = SPACE.params(proposal.point)
        violates = max(params["x"], 0.0)
        found.append((violates, bowl(params) - 100 * violates))
        algorithm.observe([Individual(number, proposal.point, found[-1][1:], violation=violates)])
    assert min(loss for violates, loss in found if not violates) < 2.89 + 0.5
    assert sum(violates > 0.5 for violates, _ in found[-30:]) <= 6


def test_who_comes_back_from_another_island_counts_once():
    random = np.random.default_rng(1)
    individuals = [Individual(n, SPACE.sample(random), (float(n % 7),), operator="gp of losses") for n in range(40)]
    once, twice = make_algorithm("gp", SPACE), make_algorithm("gp", SPACE)
    for algorithm in (once, twice):
        algorithm.observe(individuals)
        algorithm.inform([], [], 1e9)
    twice.forget([3, 4, 5])
    twice.observe(individuals[3:6])
    assert once.propose(np.random.default_rng(0)).point == twice.propose(np.random.default_rng(0)).point


@pytest.mark.parametrize("trained_s", [0.0, 1e9])
def test_short_trials_are_left_to_evolution_when_models_have_had_their_time(trained_s):
    algorithm, random = BayesianEvolution(SPACE), np.random.default_rng(1)
    many = int(FREE_S / 0.01)
    algorithm.observe([Individual(n, SPACE.sample(random), (float(n),), operator="uniform") for n in range(many)])
    algorithm.inform([], [], trained_s)
    operators = {algorithm.propose(random).operator for _ in range(12)}
    assert bool(operators & set(MODELS)) == (trained_s > 0)


def test_who_finds_better_points_proposes_more():
    algorithm, random = BayesianEvolution(SPACE), np.random.default_rng(1)
    for number in range(80):
        operator = "uniform" if number < 20 else ("crossover" if number % 2 else MODELS[0])
        loss = 100.0 - number if operator == "crossover" else 200.0 + number
        algorithm.observe([Individual(number, SPACE.sample(random), (loss,), operator=operator)])
    drawn = [algorithm._drawn(random) for _ in range(400)]
    assert drawn.count(EVOLUTION) > 3 * drawn.count(MODELS[0])


@pytest.mark.parametrize("values", [[1.0] * 30, [float(n % 2) for n in range(30)], [1e300 * n for n in range(30)]])
@pytest.mark.parametrize("words", ["auto", "gp"])
def test_flat_steep_and_huge_losses_are_learnt(words, values):
    space = Space.of({"x": Float(0, 1), "n": Int(1, 9), "kind": Choice("a", "b", opens={"b": {"c": Float(0, 1)}})})
    algorithm, random = make_algorithm(words, space), np.random.default_rng(0)
    algorithm.observe([Individual(n, space.sample(random), (value,)) for n, value in enumerate(values)])
    for _ in range(10):
        algorithm.inform([], [], 1e9)
        assert space.snap(point := algorithm.propose(random).point) == point


@pytest.mark.parametrize("words", ["auto", "gp"])
def test_losses_that_are_none_and_slack_of_constraints_are_taken(words):
    algorithm, random = make_algorithm(words, SPACE), np.random.default_rng(0)
    for number in range(30):
        point = algorithm.propose(random).point
        loss = math.nan if number < 15 else bowl(SPACE.params(point))
        algorithm.observe([Individual(number, point, (loss,), violation=-1.0 if number % 2 else math.nan)])
    assert SPACE.has(algorithm.propose(random).point)
