"""Means are those of the exact sums, whatever kind of number is measured."""

import math

import pytest
import torch

from lockstep.collectives import alone
from lockstep.run.measures import Measures


def mean(*values, samples=1):
    measures = Measures()
    for value in values:
        measures.add("it", value, samples)
    return measures.reduce(alone())["it"]


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


@pytest.mark.parametrize("values", [[math.nan, 1.0], [math.inf, -math.inf], [torch.tensor([math.nan, 1.0])]])
def test_what_is_not_a_number_stays_so(values):
    assert math.isnan(mean(*values))
