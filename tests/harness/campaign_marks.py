"""What runs in `make campaign` only: parameters with a mark, and parts of tests that ask."""

import itertools
import os
from collections.abc import Callable, Iterable

import pytest

IN_CAMPAIGN = "LOCKSTEP_CAMPAIGN" in os.environ


def combinations(*values: Iterable[object], campaign: Callable[..., bool]) -> list[object]:
    """Every combination of the values of one parameter or of several, for `parametrize`.

    Those of which ``campaign`` says so have the mark of that name.
    """
    return [
        pytest.param(*one, marks=[pytest.mark.campaign] if campaign(*one) else []) for one in itertools.product(*values)
    ]
