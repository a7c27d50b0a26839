"""A strategy around another one is and does what the other is and does, but for what it overrides."""

import inspect

import pytest

from lockstep.strategies.delegation import DelegatingStrategy
from lockstep.strategies.strategy import Strategy

NAMES = sorted(
    {name for name in (*vars(Strategy), *inspect.get_annotations(Strategy)) if not name.startswith("_")} - {"abc"}
)


class Other:
    """Has each name of `Strategy`, with a value of its own."""

    def __getattr__(self, name):
        return f"the other's {name}"


class Around(DelegatingStrategy):
    def delegate(self):
        return Other()


class AroundWithOwnSetup(Around):
    repeats_step = False

    def __init__(self):
        self.assignment = "own"


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_strategy_has_is_that_of_the_other(name):
    assert getattr(Around(), name) == f"the other's {name}"


def test_what_a_class_or_an_instance_has_itself_comes_first():
    own = AroundWithOwnSetup()
    assert (own.assignment, own.repeats_step, own.state_part) == ("own", False, "the other's state_part")
