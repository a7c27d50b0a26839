"""How a model is cut into stages."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from lockstep.errors import SettingError
from lockstep.strategies.pipelined.partition import (
    balance,
    called_modules,
    measured_times_s,
    merge_repeated_calls,
    parameter_counts,
    split_stages,
    stage_of_tensors,
    trace,
)
from residual import Residual


def runs(cuts, costs):
    edges = [0, *cuts, len(costs)]
    return [costs[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_the_dearest_run_is_as_cheap_as_it_can_be(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    found = runs(balance(costs, parts), costs)
    every = (runs(cuts, costs) for cuts in itertools.combinations(range(1, len(costs)), parts - 1))
    assert len(found) == parts
    assert all(found)
    assert max(map(sum, found)) == min(max(map(sum, each)) for each in every)


@pytest.mark.parametrize(("places", "parts"), [(2, 3), (0, 1), (3, 0)])
def test_a_row_is_not_cut_into_more_parts_than_it_has_places(places, parts):
    with pytest.raises(ValueError, match=f"{places} places cannot be cut into {parts} parts"):
        balance([1.0] * places, parts)


#: Where it is cut, and how many values cross each border: the skip is one of them until it is added.
CUTS = {
    "body": [1, 0],
    "body.1": [2, 0],
    "norm": [2, 0],
    "body.1+norm": [2, 2, 0],
    "body.0+body.2+head": [1, 2, 1, 0],
}


def through(model, made, x):
    """The output, and what crossed each border."""
    crossed, values = [], ()
    for stage in made:
        values = fx.GraphModule(model, stage.graph)(x, *values)
        crossed.append(len(stage.crossing))
    return values, crossed


@pytest.mark.parametrize(("cut", "crossing"), CUTS.items())
@pytest.mark.parametrize("training", [True, False])
def test_the_stages_one_after_the_other_are_the_model(cut, crossing, training):
    cuts = cut.split("+")
    torch.manual_seed(0)
    model, x = Residual().train(training), torch.randn(6, 3, 5, 5)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    made = split_stages(trace(model, cuts), cuts)
    found, crossed = through(model, made, x)
    assert torch.equal(found["out"], expected["out"])
    assert found["size"] == expected["size"] == 7
    assert crossed == crossing


@pytest.mark.parametrize("cut", CUTS)
def test_each_tensor_has_one_owner(cut):
    model, cuts = Residual(), cut.split("+")
    owner = stage_of_tensors(model, [split_stages(trace(model, cuts), cuts)])
    assert owner.keys() == {n for n, _ in (*model.named_parameters(), *model.named_buffers())}
    assert owner["stem.weight"] == owner["stem.bias"] == 0
    assert owner["head.weight"] == len(cuts)
    assert owner["scale"] <= owner["norm.running_mean"]


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_a_cut_may_lie_inside_of_a_module():
    model = nn.Sequential(Inner(), nn.ReLU())
    assert called_modules(trace(model)) == ["0", "1"]
    made = split_stages(trace(model, ["0.second"]), ["0.second"])
    x = torch.randn(2, 3)
    assert torch.equal(through(model, made, x)[0], model(x))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        x = self.a(x)
        return self.b(x) if x.sum() > 0 else x


class Anything(Branching):
    def forward(self, *inputs):
        return self.b(self.a(inputs[0]))


class Twice(Branching):
    def forward(self, x):
        return self.a(self.b(self.a(x)))


@pytest.mark.parametrize(
    ("model", "cuts", "words"),
    [
        (Branching(), ["b"], "Branching.forward cannot be cut"),
        (Anything(), ["b"], r"takes \*args"),
        (Inner(), ["third"], "cut=third: forward calls no such module; it calls second"),
        (Inner(), ["first"], "no module is called before first in stage 0"),
        (nn.Sequential(*(nn.ReLU() for _ in range(4))), ["2", "1"], "no module is called before 1 in stage 1"),
        (Twice(), ["b"], r"a.weight is used in stages \[0, 1\]"),
    ],
)
def test_what_cannot_be_cut_is_refused(model, cuts, words):
    with pytest.raises(SettingError, match=words):
        stage_of_tensors(model, [split_stages(trace(model, cuts), cuts)])


class Doubled(torch.autograd.Function):
    """A gradient that is not that of the operators in its forward pass."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


class Opaque(nn.Module):
    """What no tracer of operators follows: a branch on a value, a number made of a tensor, a gradient of its own."""

    def forward(self, x):
        scale = float(x.detach().abs().max())
        return Doubled.apply(x) * scale if x.sum() > 0 else x.reshape(x.shape[0], 2, 2).flatten(1)


@pytest.mark.parametrize("sign", [-1, 1])
def test_modules_are_taken_as_they_are(sign):
    """See docs/decisions/0008: a cut that traces what modules do inside would refuse these, or change them."""
    model = nn.Sequential(nn.Linear(4, 4), Opaque(), nn.Linear(4, 2))
    first, second = (fx.GraphModule(model, stage.graph) for stage in split_stages(trace(model, ["2"]), ["2"]))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4)), model[0].bias.fill_(sign * 9.0)
    for rows in (8, 3):
        x = torch.randn(rows, 4)
        model(x).sum().backward()
        plain = [p.grad for p in model.parameters()]
        model.zero_grad()
        second(x, *first(x)).sum().backward()
        assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), plain, strict=True))
        model.zero_grad()


def test_shared_weights_must_lie_in_one_stage():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    with pytest.raises(SettingError, match=r"0.weight is used in stages \[0, 1\]"):
        stage_of_tensors(model, [split_stages(trace(model), ["2"])])


def test_a_module_that_is_called_again_is_cut_before_its_first_call():
    names, costs = merge_repeated_calls(["a", "pool", "b", "pool", "b", "c"], [5.0, 1.0, 4.0, 1.0, 4.0, 2.0])
    assert (names, costs) == (["a", "pool", "b", "c"], [5.0, 1.0, 9.0, 2.0])


def test_costs_are_sizes_or_times():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
    graph = trace(model)
    assert parameter_counts(model, graph) == [15, 6, 0, 8]
    ticks = itertools.count()
    state, before = torch.get_rng_state(), {n: b.clone() for n, b in model.named_buffers()}
    found = measured_times_s(model, graph, [torch.zeros(5, 4)], now=lambda: float(next(ticks)))
    assert found == [1.0] * 4
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert all(p.grad is None for p in model.parameters())
