"""Spaces: what a point means, and that it goes to parameters and back."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import SettingError
from lockstep.tune.search import Bool, Choice, Float, Int, Space

atoms = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=3)
values = (
    atoms
    | st.lists(atoms, max_size=2)
    | st.lists(atoms, max_size=2).map(tuple)
    | st.dictionaries(st.text(max_size=2), atoms, max_size=2)
)


def floats():
    low = st.floats(-1e3, 1e3)
    linear = st.builds(lambda low, width: Float(low, low + width), low, st.floats(1e-3, 1e3))
    stepped = st.builds(
        lambda low, step, count: Float(low, low + step * count, step=step), low, st.floats(1e-2, 9), st.integers(1, 9)
    )
    log = st.builds(lambda low, factor: Float(low, low * factor, log=True), st.floats(1e-6, 9), st.floats(1.01, 1e6))
    return linear | stepped | log


def ints():
    linear = st.builds(lambda low, width: Int(low, low + width), st.integers(-50, 50), st.integers(1, 1000))
    stepped = st.builds(
        lambda low, step, count: Int(low, low + step * count, step=step),
        st.integers(-50, 50),
        st.integers(1, 7),
        st.integers(1, 9),
    )
    log = st.builds(lambda low, width: Int(low, low + width, log=True), st.integers(1, 50), st.integers(1, 1000))
    return linear | stepped | log


def named(dimensions, prefix):
    return {f"{prefix}{number}": dimension for number, dimension in enumerate(dimensions)}


plain = floats() | ints() | st.lists(values, min_size=1, max_size=4, unique_by=repr).map(lambda given: Choice(*given))
conditional = st.builds(
    lambda a, b, inner: Choice(
        "a",
        None,
        (1, "b"),
        opens={"a": named(a, "i"), (1, "b"): {"i0": b, "j": Choice(0, 1, opens={0: named(inner, "k")})}},
    ),
    st.lists(plain, min_size=1, max_size=2),
    plain,
    st.lists(plain, min_size=1, max_size=2),
)
any_space = st.builds(
    lambda first, last, opening: Space.of(
        named(first, "d") | ({"choice": opening} if opening else {}) | named(last, "e")
    ),
    st.lists(plain, min_size=1, max_size=2),
    st.lists(plain, max_size=1),
    st.none() | conditional,
)


@given(any_space, st.integers(0, 2**32))
def test_params_go_to_a_point_and_back(space, seed):
    point = space.sample(np.random.default_rng(seed))
    params = space.params(point)
    again = space.params(space.point(params))
    assert list(again) == list(params)
    assert len(params) == sum(space.active(point))
    for gene, exists in zip(space.genes, space.active(point), strict=True):
        if exists and isinstance(gene.dimension, Float) and gene.dimension.step is None:
            span = gene.dimension.high if gene.dimension.log else gene.dimension.high - gene.dimension.low
            assert abs(again[gene.name] - params[gene.name]) <= 1e-9 * max(span, abs(gene.dimension.low))
        elif exists:
            assert again[gene.name] == params[gene.name]
            assert type(again[gene.name]) is type(params[gene.name])


@given(any_space, st.data())
def test_wherever_genes_lie_the_snapped_point_is_in_the_space_and_stays(space, data):
    genes = data.draw(st.lists(st.floats(-2, 9), min_size=len(space), max_size=len(space)))
    point = space.snap(tuple(genes))
    assert space.snap(point) == point
    assert space.snap_all(np.array([genes, genes])).tolist() == [list(point)] * 2
    for gene, place in zip(space.genes, point, strict=True):
        value = gene.dimension.value(place)
        if not isinstance(gene.dimension, Choice):
            assert gene.dimension.low <= value <= gene.dimension.high
    assert space.point(space.params(point)) == pytest.approx(point, abs=1e-6)


@given(any_space)
def test_a_space_goes_through_json(space):
    again = Space.from_json(json.loads(json.dumps(space.to_json())))
    assert again == space
    point = space.sample(np.random.default_rng(0))
    assert again.params(point) == space.params(point)


@given(ints())
def test_each_whole_number_owns_as_much_as_every_other_of_its_gene(dimension):
    """The widths of the parts, from where each begins: equal, or falling as 1 / n in a logarithm."""
    if dimension.cells > 50:
        return
    found = [dimension.value((n + 0.5) / 5_000) for n in range(5_000)]
    counts = [found.count(value) / 5_000 for value in sorted(set(found))]
    assert len(counts) == dimension.cells
    if dimension.log:
        span = math.log(dimension.high + 0.5) - math.log(dimension.low - 0.5)
        expected = [
            (math.log(value + 0.5) - math.log(value - 0.5)) / span for value in range(dimension.low, dimension.high + 1)
        ]
    else:
        expected = [1 / dimension.cells] * dimension.cells
    assert counts == pytest.approx(expected, abs=5e-3)


def test_propulates_tuples_are_taken_as_they_are():
    space = Space.of(
        {"layers": (2, 10), "lr": (0.01, 0.0001), "activation": ("relu", "sigmoid"), "width": (16, 32, 64)}
    )
    assert [gene.dimension for gene in space.genes] == [
        Int(2, 10),
        Float(0.0001, 0.01),
        Choice("relu", "sigmoid"),
        Choice(16, 32, 64),
    ]


def test_what_a_value_opens_exists_with_it_only():
    space = Space.of(
        {
            "optimizer": Choice(
                "sgd", "adam", opens={"sgd": {"lr": Float(0, 1), "nesterov": Bool()}, "adam": {"lr": Float(0, 0.1)}}
            ),
        }
    )
    assert space.params(space.point({"optimizer": "adam", "lr": 0.05})) == {"optimizer": "adam", "lr": 0.05}
    assert space.points == math.inf
    with pytest.raises(SettingError, match="has no nesterov at these values"):
        space.point({"optimizer": "adam", "lr": 0.05, "nesterov": True})
    with pytest.raises(SettingError, match="nesterov is missing"):
        space.point({"optimizer": "sgd", "lr": 0.5})


def test_how_many_points_there_are():
    assert Space.of({"a": Int(1, 3), "b": Choice("x", "y", opens={"y": {"c": Bool()}})}).points == 3 * (1 + 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: Space.of({}), "give it a dimension"),
        (lambda: Space.of({"a": [1, 2]}), "give Float"),
        (lambda: Space.of({"a": (1,)[:0]}), "give Float"),
        (lambda: Float(1, 1), "low must be below high"),
        (lambda: Float(0, 1, log=True), "above 0"),
        (lambda: Float(0, 1, step=2), "at most high - low"),
        (lambda: Float(1, 9, log=True, step=1), "exclude each other"),
        (lambda: Float(0, math.nan), "finite"),
        (lambda: Int(0, 1.5), "is not whole"),
        (lambda: Int(0, 2**60), "2\\*\\*52"),
        (lambda: Int(0, 5, log=True), "at least 1"),
        (Choice, "give it values"),
        (lambda: Choice(1, 2, 1), "given twice"),
        (lambda: Choice(len), "cannot be written as JSON"),
        (lambda: Choice("a", opens={"b": {}}), "none of its values"),
        (lambda: Space.of({"a": Int(1, 2), "b": Choice(1, opens={1: {"a": Int(1, 2)}})}), "may exist twice"),
        (lambda: Space.of({"a": Int(1, 2)}).point({"a": 3}), "is no whole number from 1 to 2"),
        (lambda: Space.of({"a": Int(1, 2)}).point({"a": True}), "is no whole number"),
        (lambda: Space.of({"a": Choice(1, True)}).point({"a": 1.0}), "none of its values"),
    ],
)
def test_what_cannot_be_used_is_said_with_the_way_out(given, words):
    with pytest.raises(SettingError, match=words):
        given()


@given(space=any_space, seed=st.integers(0, 9), data=st.data())
def test_what_is_given_is_met_and_the_rest_is_chosen(space, seed, data):
    random = np.random.default_rng(seed)
    wanted, proposed = space.params(space.sample(random)), space.sample(random)
    names = data.draw(st.sets(st.sampled_from(sorted(wanted)))) if wanted else set()
    # A dimension that a choice opens needs the choice.
    names |= {"choice", "j"} & wanted.keys()
    some = {name: value for name, value in wanted.items() if name in names}
    found = space.params(space.complete(some, proposed, random))
    assert found.keys() >= some.keys()
    for name, value in some.items():
        assert found[name] == (pytest.approx(value) if isinstance(value, float) else value)
    assert space.complete(wanted, proposed, random) == pytest.approx(space.point(wanted))


def test_words_of_a_command_line_are_values():
    space = Space.of(
        {"lr": Float(1e-4, 1, log=True), "n": Int(1, 8), "kind": Choice("a", ("b", 2), 1, "1", None, True), "b": Bool()}
    )
    assert space.params_of_words("lr=1e-3,n=4,kind=a,b=True") == {"lr": 1e-3, "n": 4, "kind": "a", "b": True}
    assert space.params_of_words("kind=('b', 2),n=1") == {"kind": ("b", 2), "n": 1}
    assert [space.params_of_words(f"kind={word}")["kind"] for word in ("1", "'1'", "None", "True")] == [
        1,
        "1",
        None,
        True,
    ]
    for words, why in (
        ("lr", "NAME=VALUE"),
        ("lr=1,lr=1", "each name once"),
        ("lr=2", "no number from 0.0001 to 1"),
        ("n=1.5", "no whole number"),
        ("kind=b", "none of its values"),
        ("l=1", "the space has no l"),
    ):
        with pytest.raises(SettingError, match=why):
            space.params_of_words(words)
