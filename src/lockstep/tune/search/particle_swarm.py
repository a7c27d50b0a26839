"""Particle swarms in the variants that Propulate has, asynchronous, with bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from lockstep.errors import SettingError
from lockstep.tune.search.algorithm import Proposal
from lockstep.tune.search.cma_es import Array, reflected
from lockstep.tune.search.individual import Individual
from lockstep.tune.search.population import Population, rank_of
from lockstep.tune.search.space import Space


@dataclass(frozen=True, slots=True)
class Motion:
    """How a particle moves: v' = inertia v + own r1 (its best - x) + shared r2 (best of all - x), x' = x + v'.

    r1 and r2 are uniform in [0, 1), drawn for each dimension. The whole of v' is multiplied by ``constriction`` and
    then held within ``fastest`` of the range in each dimension.
    """

    inertia: float
    own: float
    shared: float
    constriction: float = 1.0
    fastest: float = math.inf

    def velocity(self, v: Array, x: Array, own_best: Array, best: Array, random: np.random.Generator) -> Array:
        """V' at ``x``, all of shape (genes,)."""
        to_own = self.own * random.random(len(x)) * (own_best - x)
        to_best = self.shared * random.random(len(x)) * (best - x)
        moved = self.constriction * (self.inertia * v + to_own + to_best)
        return np.asarray(np.clip(moved, -self.fastest, self.fastest))


#: Of Clerc and Kennedy 2002, for own + shared = 4.1: 2 / |2 - phi - sqrt(phi² - 4 phi)|.
_CONSTRICTION: Final = 2 / abs(2 - 4.1 - math.sqrt(4.1**2 - 4 * 4.1))
#: The variants, with Propulate's numbers. ``basic`` and ``clamped`` after Kennedy and Eberhart 1995 with an inertia
#: (Shi and Eberhart 1998), ``constriction`` after Clerc and Kennedy 2002, ``canonical`` the same with a limit of the
#: velocity. ``stateless`` has no velocity at all.
MOTIONS: Final = {
    "basic": Motion(0.729, 1.49445, 1.49445),
    "clamped": Motion(0.729, 1.49445, 1.49445, fastest=0.6),
    "constriction": Motion(1.0, 2.05, 2.05, constriction=_CONSTRICTION),
    "canonical": Motion(1.0, 2.05, 2.05, constriction=_CONSTRICTION, fastest=1.0),
    "stateless": Motion(0.0, 1.49445, 1.49445),
}
#: A particle that has not moved yet has a velocity of up to this part of the range, in each dimension and direction.
FIRST_VELOCITY: Final = 0.1


@dataclass(slots=True)
class _Particle:
    """Where it was, as far as is known."""

    last: Individual | None = None
    before: Individual | None = None
    best: Individual | None = None

    def observe(self, individual: Individual) -> None:
        self.before, self.last = self.last, individual
        if self.best is None or rank_of(individual) < rank_of(self.best):
            self.best = individual


@dataclass(slots=True)
class ParticleSwarm:
    """Particles of one worker, which take turns; the best that they follow is that of the whole island.

    Where a particle was is told by the individuals that it bred, so a worker that begins again has the same swarm. A
    particle beyond a limit is reflected. A choice counts as a number, its values in the order in which they were given.

    Args:
        space: what is searched.
        variant: one of `MOTIONS`.
        worker: whose particles they are.
        particles: how many this worker has.

    Raises:
        SettingError: for a variant that there is not, or no particles.
    """

    space: Space
    variant: str = "constriction"
    worker: int = 0
    particles: int = 8
    _population: Population = field(default_factory=Population)
    _swarm: list[_Particle] = field(default_factory=list)
    _turn: int = 0

    def __post_init__(self) -> None:
        if self.variant not in MOTIONS:
            raise SettingError(f"pso: variant={self.variant!r}: give one of {', '.join(MOTIONS)}")
        if self.particles < 1:
            raise SettingError(f"pso: particles={self.particles}: give at least 1")
        self._swarm = [_Particle() for _ in range(self.particles)]

    def observe(self, individuals: Sequence[Individual]) -> None:
        """Particles are where these say; the best of the island may be among them."""
        self._population.add(individuals)
        for individual in individuals:
            name, _, number = individual.operator.partition(" ")
            if individual.worker == self.worker and name == "particle" and int(number) < self.particles:
                self._swarm[int(number)].observe(individual)
                self._turn = int(number) + 1

    def forget(self, numbers: Sequence[int]) -> None:
        """No particle follows these as the best of the island; where its own best was, a particle remembers."""
        self._population.remove(numbers)

    def propose(self, random: np.random.Generator) -> Proposal:
        """Where the particle whose turn it is goes next; a uniform point for one that has been nowhere."""
        number = self._turn % self.particles
        self._turn += 1
        particle, ranked = self._swarm[number], self._population.ranked
        last, own_best = particle.last, particle.best
        if last is None or own_best is None or not ranked:
            return Proposal(self.space.sample(random), (), f"particle {number}")
        x = places(self.space, last.point)
        if particle.before is None:
            v = random.uniform(-FIRST_VELOCITY, FIRST_VELOCITY, len(x))
        else:
            v = x - places(self.space, particle.before.point)
        best = ranked[0]
        v = MOTIONS[self.variant].velocity(
            v, x, places(self.space, own_best.point), places(self.space, best.point), random
        )
        parents = tuple(dict.fromkeys((last.number, own_best.number, best.number)))
        return Proposal(self.space.snap(reflected(x + v) * self.space.widths), parents, f"particle {number}")


def places(space: Space, point: Sequence[float]) -> Array:
    """``point`` with all genes between 0 and 1: an index of a choice as the middle of its part."""
    return np.asarray((np.array(point) + np.where(space.is_choice, 0.5, 0.0)) / space.widths)
