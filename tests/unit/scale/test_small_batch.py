"""A device's time for a smaller batch: laws, and how well published single GPUs are said by those of other models."""

from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate import BATCHES, TABLE, batch_errors
from lockstep.scale import read_rows, shipped_loss
from lockstep.scale.step_profile import fixed_share, rate_at, time_at

shares = st.floats(0, 5)


@given(st.floats(0.001, 1), st.floats(0.001, 1), shares)
def test_a_smaller_batch_takes_no_longer_and_at_no_higher_rate(one, other, share):
    small, large = sorted((one, other))
    assert time_at(small, share) <= time_at(large, share) <= time_at(1, share) == pytest.approx(1)
    assert rate_at(small, share) <= rate_at(large, share) * (1 + 1e-12)
    assert rate_at(small, share) <= rate_at(small, share / 2) * (1 + 1e-12)


@given(st.floats(0.01, 0.9), shares)
def test_two_sizes_say_the_share(ratio, share):
    time = time_at(ratio, share)
    assert fixed_share(ratio, time) == pytest.approx(share, abs=1e-6 * (1 + share)) or time > 0.99
    assert fixed_share(ratio, ratio / 2) == 0


def test_published_gpus_are_said_by_those_of_other_models():
    """Better than a rate that stays, and than 0.1, which was taken before there were others."""
    errors = batch_errors([row for table in (TABLE, BATCHES) for row in read_rows(table.read_text())[0]])
    assert len(errors["0"]) > 50
    assert fmean(errors["that of other models"]) < fmean(errors["0.1"]) < fmean(errors["0"])
    assert median(errors["that of other models"]) < 0.07
    constants = shipped_loss().constants
    assert constants.fixed_share_least < constants.fixed_share < constants.fixed_share_most
