"""Which sums over ranks depend on how many ranks there are."""

import numpy as np
import pytest
import torch

from lockstep.run.loop.rank_operations import _is_fractional


@pytest.mark.parametrize(
    ("total", "fractional"),
    [
        (3, False),
        (True, False),
        (4.0, False),
        (0.1 + 0.2, True),
        (float("nan"), True),
        (torch.tensor([1, 2]), False),
        (torch.tensor([1.0, -2.0]), False),
        (torch.tensor([1.0, 2.5]), True),
        (torch.tensor(1 + 0.5j), True),
        (torch.tensor([True]), False),
        (torch.zeros(0), False),
        (np.float64(0.5), True),
        (np.array([1.0, 2.0]), False),
        (np.array([1.0, 0.3]), True),
        (np.arange(3), False),
        ("text", False),
    ],
)
def test_a_sum_depends_on_the_number_of_ranks_if_something_in_it_is_not_whole(total, fractional):
    assert _is_fractional(total) is fractional
