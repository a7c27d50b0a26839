"""The protocol of search algorithms: what breeds the next point from what a worker knows of its island."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from lockstep.tune.search.individual import Individual, Point


@dataclass(frozen=True, slots=True)
class Proposal:
    """A point to evaluate, and where it comes from."""

    point: Point
    parents: tuple[int, ...] = ()  #: numbers of the trials it was bred from
    operator: str = ""  #: what bred it, for people


class Algorithm(Protocol):
    """Breeds points for one worker. Knows neither files nor ranks; draws only from the generator it is given.

    A worker that is restarted makes a new algorithm and calls `observe` for all individuals again, in the order in
    which it had learnt of them, so what an algorithm knows is a function of that order.
    """

    def observe(self, individuals: Sequence[Individual]) -> None:
        """These were evaluated or have immigrated since the last call; each comes once, in the order of learning."""

    def forget(self, numbers: Sequence[int]) -> None:
        """These have emigrated or were replaced by immigrants: they breed no more."""

    def propose(self, random: np.random.Generator) -> Proposal:
        """The next point to evaluate, from what is known; nothing known is not an error."""


@runtime_checkable
class InformedAlgorithm(Algorithm, Protocol):
    """An algorithm that wants to know more than losses."""

    def inform(self, running: Sequence[Point], failed: Sequence[Point], trained_s: float) -> None:
        """Is called before each `propose`.

        Args:
            running: what the island's other workers evaluate now.
            failed: what gave no loss on the island, in the order of learning.
            trained_s: how long all trials of the island that are known have taken, in seconds.
        """
