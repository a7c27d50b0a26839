"""The downhill simplex of Nelder and Mead (1965), "A simplex method for function minimization", step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from lockstep.tune.search.algorithm import Proposal
from lockstep.tune.search.cma_es import Array, reflected
from lockstep.tune.search.individual import Individual
from lockstep.tune.search.particle_swarm import places
from lockstep.tune.search.population import Rank, rank_of
from lockstep.tune.search.space import Space

#: The edges of a new simplex, in units of the range.
FIRST_EDGE: Final = 0.1
#: A simplex smaller than this in every direction has converged.
SMALLEST: Final = 1e-9

Move: TypeAlias = Literal["start", "build", "reflect", "expand", "contract outside", "contract inside", "shrink"]


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Of reflection, expansion, contraction and shrinking."""

    alpha: float = 1.0
    gamma: float = 2.0
    rho: float = 0.5
    sigma: float = 0.5

    @classmethod
    def adaptive(cls, genes: int) -> Coefficients:
        """Of Gao and Han 2012, which keep a simplex of many dimensions from shrinking too soon."""
        genes = max(genes, 2)
        return cls(1.0, 1 + 2 / genes, 0.75 - 1 / (2 * genes), 1 - 1 / genes)


@dataclass(frozen=True, slots=True, eq=False)
class Vertex:
    """A corner of the simplex."""

    place: Array
    rank: Rank
    number: int


class NelderMead:
    """A simplex for each worker, which knows of no other: nobody waits for anybody.

    It begins at the worker's first individual, a uniform point, with an edge along each dimension, and again elsewhere
    once it has converged. What comes next is a function of the worker's own individuals in their order. A vertex beyond
    a limit is reflected there. A choice counts as a number, its values in the order in which they were given.
    """

    def __init__(self, space: Space, worker: int = 0, adaptive: bool = False) -> None:
        self._space, self._worker = space, worker
        self._coefficients = Coefficients.adaptive(len(space)) if adaptive else Coefficients()
        self._simplex: list[Vertex] = []  # from the best to the worst, once it is whole
        self._move: Move = "start"
        self._reflection: Vertex | None = None
        self._shrunk: list[Vertex] = []

    def observe(self, individuals: Sequence[Individual]) -> None:
        """What this worker has bred answers the move that was proposed."""
        for individual in individuals:
            if individual.worker == self._worker and individual.operator.startswith("simplex"):
                self._answer(Vertex(places(self._space, individual.point), rank_of(individual), individual.number))

    def forget(self, numbers: Sequence[int]) -> None:
        """The simplex keeps its corners, also where these have emigrated."""

    def propose(self, random: np.random.Generator) -> Proposal:
        """The next corner to try."""
        place = random.random(len(self._space)) if self._move == "start" else reflected(self._next())
        parents = tuple(vertex.number for vertex in self._simplex)
        return Proposal(self._space.snap(place * self._space.widths), parents, f"simplex: {self._move}")

    def _next(self) -> Array:
        c, best = self._coefficients, self._simplex[0].place
        if self._move == "build":
            place = best.copy()
            axis = len(self._simplex) - 1
            place[axis] += FIRST_EDGE if place[axis] <= 0.5 else -FIRST_EDGE
            return place
        if self._move == "shrink":
            return best + c.sigma * (self._simplex[1 + len(self._shrunk)].place - best)
        worst = self._simplex[-1].place
        centroid = np.mean([vertex.place for vertex in self._simplex[:-1]], axis=0)
        along = {
            "reflect": c.alpha,
            "expand": c.alpha * c.gamma,
            "contract outside": c.alpha * c.rho,
            "contract inside": -c.rho,
        }[self._move]
        return np.asarray(centroid + along * (centroid - worst))

    def _answer(self, vertex: Vertex) -> None:
        """The simplex and the next move after ``vertex`` was evaluated."""
        if self._move in ("start", "build"):
            self._simplex.append(vertex)
            self._move = "build"
            if len(self._simplex) == len(self._space) + 1:
                self._go_on()
        elif self._move == "reflect":
            self._after_reflection(vertex)
        elif self._move == "shrink":
            self._shrunk.append(vertex)
            if len(self._shrunk) == len(self._space):
                self._simplex, self._shrunk = [self._simplex[0], *self._shrunk], []
                self._go_on()
        else:
            self._after_second(vertex)

    def _after_reflection(self, vertex: Vertex) -> None:
        self._reflection = vertex
        if vertex.rank < self._simplex[0].rank:
            self._move = "expand"
        elif vertex.rank < self._simplex[-2].rank:
            self._replace_worst(vertex)
        else:
            self._move = "contract outside" if vertex.rank < self._simplex[-1].rank else "contract inside"

    def _after_second(self, vertex: Vertex) -> None:
        """After an expansion or a contraction."""
        reflection = self._reflection
        if reflection is None:
            return
        if self._move == "expand":
            self._replace_worst(min(vertex, reflection, key=lambda one: one.rank))
        elif vertex.rank <= (reflection if self._move == "contract outside" else self._simplex[-1]).rank:
            self._replace_worst(vertex)
        else:
            self._move = "shrink"

    def _replace_worst(self, vertex: Vertex) -> None:
        self._simplex[-1] = vertex
        self._go_on()

    def _go_on(self) -> None:
        """Reflects next, or begins elsewhere."""
        self._simplex.sort(key=lambda vertex: vertex.rank)
        self._move, self._reflection = "reflect", None
        corners = np.array([vertex.place for vertex in self._simplex])
        if np.ptp(corners, axis=0).max() < SMALLEST:
            self._simplex, self._move = [], "start"
