"""Which sums over ranks depend on how many ranks there are."""

import numpy as np
import pytest
import torch

from device_costs import DEVICE, Costs
from lockstep.collectives import single_rank_group
from lockstep.run.loop.rank_operations import RankOperations, _is_fractional
from lockstep.run.metrics.metric_means import PassMetrics
from lockstep.world import World


@pytest.mark.parametrize(("device", "waits"), [(torch.device("cpu"), 2), (DEVICE, 0)])
def test_a_sum_of_tensors_lies_where_the_tensors_do(device, waits):
    """Counts on the CPU come back to it from the ranks' device, where they are added up; others stay there."""
    ranks = RankOperations(
        single_rank_group(DEVICE),
        World(0, 1, 0, 1, 0, 1),
        PassMetrics(counts=True),
        *(lambda _: None, lambda: None, pytest.fail, lambda _: ""),
    )
    confusion = torch.ones(3, 3, dtype=torch.int32, device=device)
    with Costs() as costs:
        total = ranks.sum(confusion)
    assert (total.device, total.dtype, total.shape) == (device, torch.int64, confusion.shape)
    assert costs.waits == waits
    assert ranks.mean(torch.ones(2, device=DEVICE)).device == DEVICE


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
