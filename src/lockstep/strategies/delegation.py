"""Strategies around another one: which of them is asked for an ability.

Zero ──► Ddp                       the first of the two that has an ability is asked
TensorParallel ──► FullySharded
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from lockstep.strategies.protocol import Strategy


@runtime_checkable
class Delegates(Protocol):
    """A strategy that leaves the abilities which it does not have itself to another strategy."""

    def delegate(self) -> Strategy | None:
        """The other strategy; None while there is none yet: then it has its own abilities alone."""
        ...


def delegation_chain(strategy: Strategy) -> Iterator[Strategy]:
    """``strategy``, the one that it delegates to, and so on: the first with an ability is the one that is asked."""
    each: Strategy | None = strategy
    while each is not None:
        yield each
        each = each.delegate() if has_ability(type(each), Delegates) else None  # type: ignore[attr-defined]


def first_with(ability: type, strategy: Strategy) -> Any:
    """The first of ``strategy`` and those that it delegates to that has ``ability``; None: none of them has."""
    # As through `delegation_chain`, without a generator: it is asked several times in a step.
    each: Strategy | None = strategy
    while each is not None and not has_ability(type(each), ability):
        each = each.delegate() if has_ability(type(each), Delegates) else None  # type: ignore[attr-defined]
    return each


@functools.cache
def has_ability(kind: type, ability: type) -> bool:
    """Whether strategies of a class have ``ability``, which consists of methods.

    The same as by ``isinstance``, in a tenth of its time, for what is asked several times in a step.
    """
    return issubclass(kind, ability)
