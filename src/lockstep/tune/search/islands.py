"""Islands: which worker works on which, and which individuals move between them. Plans only; workers record them.

After Propulate (Taubert et al. 2023): with true migration emigrants leave their island; with pollination copies of them
go, and each takes the place of a resident. Different from there: what lives where is a function of the *set* of
records, in whatever order a worker learns of them, and an individual lives on an island once, however often it is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from lockstep.errors import SettingError
from lockstep.tune.search.individual import Individual
from lockstep.tune.search.operators import SELECTIONS
from lockstep.tune.search.population import Population, Ranked

#: Copies are made of this many of the best individuals. With this limit, an island that finds nothing new sends nothing
#: rather than worse and worse individuals, and the cost does not grow with the population.
POOL: Final = 64


@dataclass(frozen=True, slots=True)
class Islands:
    """How a search is divided into islands.

    Args:
        count: how many islands, with as many workers each as can be: worker w works on island w modulo ``count``.
        sizes: in place of ``count``, how many workers each has: the first ones on island 0, and so on. Workers beyond
            their sum, which have joined later, are distributed over the islands in turn.
        migration: after an evaluation a worker sends emigrants with this probability, divided by the number of workers
            of its island.
        topology: row i says how many individuals island i sends to each island at a time; None: one to each other.
        pollination: True: copies are sent, and each replaces an individual; False: emigrants leave their island.
        emigrants: which individuals are sent: ``best``, ``worst``, ``uniform`` or ``tournament``.
        immigrants: which individuals are replaced by copies: one of the same.
        algorithms: the words of each island's algorithm (`make_algorithm`), or one for all of them.

    Raises:
        SettingError: for values that cannot be used or do not fit each other.
    """

    count: int = 1
    sizes: tuple[int, ...] | None = None
    migration: float = 0.9
    topology: tuple[tuple[int, ...], ...] | None = None
    pollination: bool = True
    emigrants: str = "best"
    immigrants: str = "worst"
    algorithms: tuple[str, ...] = ("auto",)

    def __post_init__(self) -> None:
        if self.sizes is not None:
            if not self.sizes or min(self.sizes) < 1:
                raise SettingError(f"islands: sizes={self.sizes}: give each at least one worker")
            if self.count not in (1, len(self.sizes)):
                raise SettingError(f"islands: count={self.count} but {len(self.sizes)} sizes; leave count out")
            object.__setattr__(self, "count", len(self.sizes))
        if self.count < 1:
            raise SettingError(f"islands: count={self.count}: give at least 1")
        if not 0 <= self.migration <= 1:
            raise SettingError(f"islands: migration={self.migration}: give a probability, from 0 to 1")
        for what, word in (("emigrants", self.emigrants), ("immigrants", self.immigrants)):
            if word not in SELECTIONS:
                raise SettingError(f"islands: {what}={word!r}: give one of {', '.join(SELECTIONS)}")
        if len(self.algorithms) not in (1, self.count):
            raise SettingError(
                f"islands: {len(self.algorithms)} algorithms, {self.count} islands; give one for all, or one for each"
            )
        if self.topology is not None:
            _check_topology(self.topology, self.count)

    def island_of(self, worker: int) -> int:
        """The island that ``worker`` works on, always the same."""
        first = 0
        for island, size in enumerate(self.sizes or ()):
            if worker < first + size:
                return island
            first += size
        return (worker - first) % self.count

    def workers_of(self, island: int, workers: int) -> tuple[int, ...]:
        """Those of ``workers`` workers that work on ``island``."""
        return tuple(worker for worker in range(workers) if self.island_of(worker) == island)

    def algorithm_of(self, island: int) -> str:
        """The words of its algorithm."""
        return self.algorithms[island if len(self.algorithms) > 1 else 0]

    def sends(self, source: int, target: int) -> int:
        """How many individuals go from ``source`` to ``target`` at a time."""
        if self.topology is None:
            return int(source != target)
        return self.topology[source][target]


def _check_topology(topology: tuple[tuple[int, ...], ...], count: int) -> None:
    if len(topology) != count or any(len(row) != count for row in topology):
        raise SettingError(f"islands: topology={topology}: give {count} rows of {count} numbers, one for each island")
    if any(number < 0 for row in topology for number in row) or any(topology[i][i] for i in range(count)):
        raise SettingError(f"islands: topology={topology}: give numbers of at least 0, and 0 from an island to itself")


@dataclass(frozen=True, slots=True)
class Move:
    """One individual changes islands, or gives place to one that came."""

    kind: Literal["moved", "copied", "replaced"]
    number: int  #: of the individual
    source: int  #: the island that it leaves, is copied from, or ends on
    target: int  #: where it goes; for ``replaced`` the same as ``source``
    responsible: int  #: the worker of ``target`` that it is entrusted to; for ``replaced`` the one that decided so
    step: int = 0  #: ``moved``: how often it has moved before
    replaced_by: int = -1  #: ``replaced``: the copy that takes its place


class Residents:
    """The population of each island, from individuals and moves in any order; a repeated record changes nothing.

    A record costs 30 us with 40,000 individuals.
    """

    def __init__(self) -> None:
        self._individuals: dict[int, Individual] = {}
        self._moved: dict[int, Move] = {}  # of each individual the one with the largest step
        self._copied: dict[int, dict[int, Move]] = {}  # by number and target
        self._replaced: set[tuple[int, int]] = set()  # by number and island
        self._answered: set[tuple[int, int]] = set()  # copies, by number and target, that have taken a place
        self._waiting: dict[int, set[int]] = {}  # copies without a place, by the worker that has to find one
        self._on: dict[int, Population] = {}  # by island
        self._entrusted: dict[tuple[int, int], Population] = {}  # by island and responsible worker
        self._lives: dict[tuple[int, int], int] = {}  # the responsible worker, by number and island
        self._changed: dict[int, set[int]] = {}  # by island
        self._told: dict[int, set[int]] = {}  # by island

    def add_individual(self, individual: Individual) -> None:
        """It was evaluated."""
        if individual.number not in self._individuals:
            self._individuals[individual.number] = individual
            self._place(individual.number)

    def add_move(self, move: Move) -> None:
        """It was planned, here or by another worker."""
        if move.kind == "moved":
            known = self._moved.get(move.number)
            if known is None or known.step < move.step:
                self._moved[move.number] = move
        elif move.kind == "copied":
            self._copied.setdefault(move.number, {}).setdefault(move.target, move)
            self._update_waiting(move.number, move.target)
        else:
            self._replaced.add((move.number, move.source))
            self._answered.add((move.replaced_by, move.source))
            self._update_waiting(move.replaced_by, move.source)
        self._place(move.number)

    def on(self, island: int) -> Population:
        """Those that live on ``island``. Not to be changed; it changes with what is learnt."""
        return self._on.setdefault(island, Population())

    def entrusted(self, island: int, worker: int) -> Population:
        """Those on ``island`` that ``worker`` bred, or was named for by a move: not to be changed."""
        return self._entrusted.setdefault((island, worker), Population())

    def take_changes(self, island: int) -> tuple[list[Individual], list[int]]:
        """Who has come to live on ``island`` since the last call, and the numbers of those who live there no more."""
        here, told = self.on(island), self._told.setdefault(island, set())
        changed = sorted(self._changed.pop(island, ()))
        came = [self._individuals[number] for number in changed if number in here and number not in told]
        gone = [number for number in changed if number not in here and number in told]
        told.difference_update(gone)
        told.update(individual.number for individual in came)
        return came, gone

    def has_been_on(self, number: int, island: int) -> bool:
        """Whether it lives there, or has lived there before."""
        return self._individuals[number].island == island or island in self._copied.get(number, {})

    def times_moved(self, number: int) -> int:
        """How often it has moved."""
        moved = self._moved.get(number)
        return 0 if moved is None else moved.step + 1

    def without_place(self, worker: int) -> list[int]:
        """Copies on the island of ``worker``, which has yet to find each a resident to replace."""
        return sorted(number for number in self._waiting.get(worker, ()) if number in self._individuals)

    def _update_waiting(self, number: int, target: int) -> None:
        move = self._copied.get(number, {}).get(target)
        if move is not None:
            waiting = self._waiting.setdefault(move.responsible, set())
            (waiting.discard if (number, target) in self._answered else waiting.add)(number)

    def _place(self, number: int) -> None:
        """Brings in order where it lives, which is a function of the records about it alone."""
        individual = self._individuals.get(number)
        if individual is None:
            return
        moved = self._moved.get(number)
        lives = {individual.island: individual.worker} if moved is None else {moved.target: moved.responsible}
        lives |= {target: copy.responsible for target, copy in self._copied.get(number, {}).items()}
        before = {individual.island, *lives} | {island for island in self._on if (number, island) in self._lives}
        for island in before:
            now = None if (number, island) in self._replaced else lives.get(island)
            then = self._lives.get((number, island))
            if now == then:
                continue
            if then is not None:
                self.on(island).remove([number])
                self.entrusted(island, then).remove([number])
                del self._lives[number, island]
            if now is not None:
                self.on(island).add([individual])
                self.entrusted(island, now).add([individual])
                self._lives[number, island] = now
            self._changed.setdefault(island, set()).add(number)


def plan_emigration(
    islands: Islands, residents: Residents, worker: int, workers: int, random: np.random.Generator
) -> tuple[Move, ...]:
    """Who leaves the island of ``worker`` after an evaluation of it: often nobody.

    ``workers`` is how many workers the search has. Draws with the probability of `Islands.migration` divided by the
    workers of the island. True migration: of those that are entrusted to this worker, each goes to one island only;
    nobody goes if there are fewer than the topology asks for. Pollination: to each island, copies of those of the
    `POOL` best that have not been there.
    """
    island = islands.island_of(worker)
    share = islands.migration / max(len(islands.workers_of(island, workers)), 1)
    if random.random() >= share:
        return ()
    return (_copies if islands.pollination else _emigrants)(islands, residents, worker, workers, random)


def _emigrants(
    islands: Islands, residents: Residents, worker: int, workers: int, random: np.random.Generator
) -> tuple[Move, ...]:
    island = islands.island_of(worker)
    targets = [target for target in range(islands.count) for _ in range(islands.sends(island, target))]
    eligible = residents.entrusted(island, worker).ranked
    if not targets or len(targets) > len(eligible):
        return ()
    chosen = _selected(islands.emigrants, len(targets), eligible, random)
    return tuple(
        Move(
            "moved",
            emigrant,
            island,
            target,
            _responsible(islands, emigrant, target, workers),
            residents.times_moved(emigrant),
        )
        for emigrant, target in zip(chosen, random.permutation(targets).tolist(), strict=True)
    )


def _copies(
    islands: Islands, residents: Residents, worker: int, workers: int, random: np.random.Generator
) -> tuple[Move, ...]:
    island = islands.island_of(worker)
    ranked = residents.on(island).ranked
    pool = ranked[-POOL:] if islands.emigrants == "worst" else ranked[:POOL]
    moves: list[Move] = []
    for target in range(islands.count):
        count = islands.sends(island, target)
        strangers = [one for one in pool if count and not residents.has_been_on(one.number, target)]
        if strangers:
            chosen = _selected(islands.emigrants, count, Ranked(strangers), random)
            moves += [
                Move("copied", one, island, target, _responsible(islands, one, target, workers)) for one in chosen
            ]
    return tuple(moves)


def plan_replacement(
    islands: Islands, residents: Residents, worker: int, random: np.random.Generator
) -> tuple[Move, ...]:
    """Who gives place to the copies that ``worker`` has to find places for: one resident each, none twice.

    Of those that are entrusted to it and are no such copies themselves; a copy for which there is none waits.
    """
    island = islands.island_of(worker)
    waiting = residents.without_place(worker)
    if not waiting:
        return ()
    ranked = residents.entrusted(island, worker).ranked
    # As many as are chosen are among twice as many, of which no more than half are copies that wait.
    ends = {"best": slice(2 * len(waiting)), "worst": slice(-2 * len(waiting), None)}
    eligible = [one for one in ranked[ends.get(islands.immigrants, slice(None))] if one.number not in waiting]
    chosen = _selected(islands.immigrants, len(waiting), Ranked(eligible), random)
    return tuple(
        Move("replaced", resident, island, island, worker, replaced_by=copy)
        for copy, resident in zip(waiting, chosen, strict=False)
    )


def _selected(word: str, count: int, eligible: Ranked, random: np.random.Generator) -> list[int]:
    """The numbers of those that the selection ``word`` chooses."""
    if not eligible:
        return []
    chosen = SELECTIONS[word](count)(eligible, random)
    return [one.number for one in chosen if isinstance(one, Individual)]


def _responsible(islands: Islands, number: int, target: int, workers: int) -> int:
    """The worker of ``target`` that ``number`` is entrusted to: the same one, whichever process sends it there."""
    there = islands.workers_of(target, workers)
    return there[number % len(there)] if there else -1
