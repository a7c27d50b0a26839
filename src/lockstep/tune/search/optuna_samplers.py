"""The samplers of Optuna as algorithms of an island. Optuna is imported when the first one is made."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from lockstep.errors import SettingError
from lockstep.tune.search.algorithm import Proposal
from lockstep.tune.search.dimensions import Choice, Dimension, Float
from lockstep.tune.search.individual import Individual, Point
from lockstep.tune.search.space import Space

#: Their words, each with the class in ``optuna.samplers``.
SAMPLERS: Final[Mapping[str, str]] = {
    "tpe": "TPESampler",
    "optuna-cma-es": "CmaEsSampler",
    "optuna-nsga2": "NSGAIISampler",
    "optuna-random": "RandomSampler",
}
#: Those among them that take several losses.
MULTI_OBJECTIVE_SAMPLERS: Final = ("tpe", "optuna-nsga2", "optuna-random")


class OptunaSampler:
    """One of Optuna's samplers over a study in memory, which holds all individuals that the worker knows.

    A sampler is made anew for each proposal, with a seed drawn from the generator that is handed in: no two workers
    suggest the same, and a proposal is a function of what is known. What a sampler keeps in its own trials, as those of
    CMA-ES and NSGA-II do, is lost when a worker begins again, and of other workers never known; TPE has no such thing.
    An individual that was stopped early is a pruned trial. Samplers are models of the objective, of which what has
    emigrated is still true: they forget nothing.

    Cost: the sampler's own; TPE 25 ms a proposal with 20 dimensions and 1000 individuals.

    Raises:
        SettingError: if Optuna is not installed, is older than 5, or lacks what the sampler needs.
    """

    def __init__(self, space: Space, word: str, objectives: int = 1) -> None:
        try:
            import optuna
        except ImportError as error:
            raise SettingError(
                f'algorithm={word!r} needs Optuna 5 or newer ({error}); pip install "torch-lockstep[tune]"'
            ) from None
        self._optuna = optuna
        self._word, self._space = word, space
        self._names = [f"{index} {gene.name}" for index, gene in enumerate(space.genes)]
        self._distributions = [self._distribution(gene.dimension) for gene in space.genes]
        self._asked: tuple[Point, Any] | None = None
        with self._quiet():
            self._study = optuna.create_study(directions=["minimize"] * objectives, sampler=self._sampler(0))

    def observe(self, individuals: Sequence[Individual]) -> None:
        """The study knows these from now on; not those whose loss is not finite."""
        for individual in individuals:
            if not all(map(math.isfinite, individual.losses)):
                continue
            if self._asked is not None and self._asked[0] == individual.point and self._is_plain(individual):
                self._study.tell(self._asked[1], list(individual.losses))
                self._asked = None
            else:
                self._study.add_trial(self._trial(individual))

    def forget(self, numbers: Sequence[int]) -> None:
        """Nothing: what was evaluated remains true."""

    def propose(self, random: np.random.Generator) -> Proposal:
        """What the sampler suggests now."""
        if self._asked is not None:  # it has failed, or was varied
            self._study.tell(self._asked[1], state=self._optuna.trial.TrialState.FAIL)
        try:
            with self._quiet():
                self._study.sampler = self._sampler(int(random.integers(2**31)))
                trial = self._study.ask()
                genes = [0.0] * len(self._space)
                for index, gene in enumerate(self._space.genes):
                    if self._space.active(tuple(genes))[index]:
                        genes[index] = gene.dimension.gene(self._suggested(trial, index))
        except ImportError as error:
            raise self._lacking(error) from None
        point = self._space.snap(tuple(genes))
        self._asked = point, trial
        return Proposal(point, (), self._word)

    def _sampler(self, seed: int) -> Any:
        kind = getattr(self._optuna.samplers, SAMPLERS[self._word])
        try:
            return kind(seed=seed)
        except ImportError as error:
            raise self._lacking(error) from None

    def _lacking(self, error: ImportError) -> SettingError:
        return SettingError(f"algorithm={self._word!r} needs more than Optuna: {error}; install it")

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Within, Optuna does not say what is experimental, nor that a conditional parameter is sampled by itself."""
        shown = self._optuna.logging.get_verbosity()
        self._optuna.logging.set_verbosity(self._optuna.logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            self._optuna.logging.set_verbosity(shown)

    def _distribution(self, dimension: Dimension) -> Any:
        kinds = self._optuna.distributions
        if isinstance(dimension, Choice):
            return kinds.CategoricalDistribution(tuple(range(dimension.cells)))
        if isinstance(dimension, Float) and dimension.cells:
            # By their number: Optuna counts steps in decimal fractions, and would leave the last of some out.
            return kinds.IntDistribution(0, dimension.cells - 1)
        if isinstance(dimension, Float):
            return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.log)
        high = dimension.low + (dimension.cells - 1) * (dimension.step or 1)
        return kinds.IntDistribution(dimension.low, high, log=dimension.log, step=dimension.step or 1)

    def _suggested(self, trial: Any, index: int) -> Any:
        name, dimension = self._names[index], self._space.genes[index].dimension
        if isinstance(dimension, Choice):
            return dimension.values[trial.suggest_categorical(name, tuple(range(dimension.cells)))]
        of = self._distributions[index]
        if isinstance(dimension, Float) and dimension.cells:
            return dimension.value((trial.suggest_int(name, of.low, of.high) + 0.5) / dimension.cells)
        suggest = trial.suggest_float if isinstance(dimension, Float) else trial.suggest_int
        return suggest(name, of.low, of.high, log=of.log, step=of.step)

    def _is_plain(self, individual: Individual) -> bool:
        return individual.budget is None and not individual.violation

    def _trial(self, individual: Individual) -> Any:
        """A frozen trial of Optuna."""
        params: dict[str, Any] = {}
        distributions: dict[str, Any] = {}
        exist = self._space.active(individual.point)
        for index, gene in enumerate(self._space.genes):
            if exist[index]:
                params[self._names[index]] = _told(gene.dimension, individual.point[index])
                distributions[self._names[index]] = self._distributions[index]
        stopped = individual.budget is not None and len(individual.losses) == 1
        state = self._optuna.trial.TrialState.PRUNED if stopped else self._optuna.trial.TrialState.COMPLETE
        return self._optuna.trial.create_trial(
            state=state,
            values=list(individual.losses),
            params=params,
            distributions=distributions,
            intermediate_values={individual.budget or 0: individual.losses[0]} if stopped else None,
            constraints={"violation": individual.violation} if individual.violation else None,
        )


def _told(dimension: Dimension, place: float) -> Any:
    """What the study knows of a gene: the number of the value, where it is a choice or has steps."""
    if isinstance(dimension, Choice):
        return int(place)
    if isinstance(dimension, Float) and dimension.cells:
        return min(int(place * dimension.cells), dimension.cells - 1)
    return dimension.value(place)
