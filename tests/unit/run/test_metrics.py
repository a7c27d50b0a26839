"""Means are those of the exact sums, whatever kind of number is measured."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from device_costs import DEVICE, Costs
from lockstep.collectives import single_rank_group
from lockstep.errors import UsageError
from lockstep.run import Run
from lockstep.run.metrics.metric_means import MetricMeans, measured


def mean(*values, samples=1, counts=None):
    measures = MetricMeans()
    for value, count in zip(values, counts or [None] * len(values), strict=True):
        measures.add(*measured("it", value, samples, count))
    return measures.reduce(single_rank_group())["it"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.1], 0.1),  # not the nearest number of 32 bits
        ([1e308, 1e308, -1e308], 1e308 / 3),
        ([1e16, 1.0, -1e16], 1 / 3),
        ([5e-324], 5e-324),
        ([2**53 - 1], float(2**53 - 1)),
        ([True, False], 0.5),
        ([torch.tensor([True, False, True, False])], 0.5),
        ([torch.tensor([2**52, 1, -(2**52)])], 1 / 3),
        ([torch.tensor([0.1, 0.2], dtype=torch.float64)], (0.1 + 0.2) / 2),
        ([torch.tensor([1.0, 2**-8, -1.0], dtype=torch.bfloat16)], 2**-8 / 3),
        ([torch.tensor([1e8, 1.0, -1e8])], 1 / 3),
        ([math.inf, 1.0], math.inf),
        ([-math.inf, 1.0], -math.inf),
    ],
)
def test_means_are_exact(values, expected):
    assert mean(*values) == expected
    assert mean(*reversed(values)) == expected


def test_values_and_counts_on_a_device_are_waited_for_once():
    measures = MetricMeans()
    for number in range(20):
        value = torch.ones((), dtype=torch.bfloat16, device=DEVICE) if number % 2 else float(number)
        measures.add(*measured("it", value, 4, torch.ones((), dtype=torch.int64, device=DEVICE)))
        measures.add(*measured("loss", torch.ones((), device=DEVICE), 4))
    with Costs() as costs:
        measures.own()
    assert costs.waits == 2, "once for each name"


def test_counts_in_tensors_are_exact_beside_values_of_few_bits():
    """As they come from a GPU: as tensors."""
    measures = MetricMeans()
    for value, count in [(0.5, 2**24 + 1), (0.25, 2**53 - 1), (2.0, 0)]:
        items = torch.tensor(count)
        measures.add("it", torch.tensor(value, dtype=torch.bfloat16), items, items)
    measures.add("it", 0.125, torch.tensor(3), torch.tensor(3))
    total, _, count = measures.own()["it"]
    assert count == 2**24 + 1 + 2**53 - 1 + 3
    assert Fraction(total, 1 << 1074) == Fraction(2**24 + 1, 2) + Fraction(2**53 - 1, 4) + Fraction(3, 8)


@pytest.mark.parametrize("values", [[math.nan, 1.0], [math.inf, -math.inf], [torch.tensor([math.nan, 1.0])]])
def test_what_is_not_a_number_stays_so(values):
    assert math.isnan(mean(*values))


def test_a_mean_weighs_what_it_is_the_mean_of():
    assert mean(1.0, 4.0, samples=7) == 2.5
    assert mean(1.0, 4.0, samples=7, counts=[2, 1]) == 2.0
    assert mean(torch.tensor(1.0), torch.tensor(4.0), counts=[torch.tensor(2), torch.tensor(1)]) == 2.0
    assert mean(0.5, math.nan, counts=[3, 0]) != mean(0.5, counts=[3]), "nan stays, also as the mean of nothing"
    assert mean(0.5, 100.0, counts=[3, 0]) == 0.5


@given(st.lists(st.tuples(st.floats(width=32), st.integers(0, 99)), min_size=1))
def test_what_waits_on_a_device_and_what_does_not_have_the_same_mean(values):
    at_once, waited = MetricMeans(), MetricMeans()
    for place, (value, count) in enumerate(values):
        at_once.add("it", value, count, count)
        # As on a GPU; among them such as are known.
        waited.add("it", torch.tensor(value), torch.tensor(count), torch.tensor(count))
        for means in (at_once, waited) if place % 2 else ():
            means.add("it", 0.25, 3, 3)
    at_once, waited = (means.reduce(single_rank_group())["it"] for means in (at_once, waited))
    assert at_once == waited or (math.isnan(at_once) and math.isnan(waited))


def test_what_was_measured_stays_when_the_script_goes_on_in_its_tensors():
    with Run(seed=0, strategy="none") as run:
        net = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(net.parameters(), lr=0.0))
        expected = 0.0
        for _ in run.epochs(1):
            for x in run.train(run.loader(torch.ones(6, 2), global_batch=4, micro_batch=2, shuffle=False)):
                # What counts are tensors of waits, as all that is on a GPU does.
                loss, metric, count = net(x).square().mean(), torch.tensor(3.0), torch.tensor(5)
                expected = loss.item()
                run.step(loss, count=count)
                run.measure(metric=metric, count=count)
                for each in (loss.detach(), metric, count):
                    each.mul_(7)
        assert run.metrics == {"loss": expected, "metric": 3.0}


def test_a_count_is_for_one_number():
    with pytest.raises(UsageError, match=r"measure\(it=tensor of shape \(3,\), count=...\): count is for one number"):
        mean(torch.ones(3), counts=[3])
