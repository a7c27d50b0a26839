"""An evaluated point of the search space, and the population that a worker knows."""

from __future__ import annotations

from dataclasses import dataclass

#: A place in the search space, one gene for each dimension: numbers of a `Float` or an `Int` as their place between 0
#: and 1 (after the logarithm where the dimension has one), a `Choice` as the index of its value. The one source of
#: truth: `Space.params` derives the values from it, always the same ones.
Point = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Individual:
    """A point with its losses. Frozen; a migrated copy keeps its number, so that no pool holds it twice."""

    number: int  #: of the trial
    point: Point
    losses: tuple[float, ...]  #: smaller is better; one that is not finite breeds nothing
    violation: float = 0.0  #: 0: satisfies all constraints
    budget: int | None = None  #: reports until it was stopped early; None: trained to its end
    island: int = 0  #: where it was bred
    worker: int = 0  #: who bred it
    parents: tuple[int, ...] = ()  #: as its `Proposal` says
    operator: str = ""  #: as its `Proposal` says; algorithms learn from it which of their moves succeed
