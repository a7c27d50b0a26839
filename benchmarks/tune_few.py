"""How good searches are after few trials: the best loss after 30, 60, 100 and 200, beside other searches.

python benchmarks/tune_few.py --results few.jsonl                # goes on where an earlier run with that file stopped
python benchmarks/tune_few.py --results few.jsonl --show         # its tables; --page docs/search_measured.md
python benchmarks/tune_few.py --objectives tuned --rounds 3 --workers 1 --contestants auto "Optuna gp"

All are simulated alike in this process: the workers take turns, each proposes without the results that the others have
in hand, and knows what these evaluate. Every trial counts as dear (a minute), so our models are not held back. Optuna's
TPE is multivariate and grouped; with a space of numbers only its CMA-ES is itself, and it draws choices at random.
Optuna's own packages cmaes, scipy and torch must be installed for its cma-es and gp; SMAC3 2 and scikit-learn suffice
for its forest, so that has a python of its own: name the contestants, and let all runs write to one file of results.

A loss counts from the least that is possible (0), so the table of ratios says by how much one is behind the median of
all; ranks are means over the objectives of the rank of the median over rounds.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.tune.search import Choice, Float, Individual, Int, Point, Space, make_algorithm
from tune_functions import best_at
from tune_objectives import FRESH, TUNED, Objective

MARKS = [30, 60, 100, 200]
OBJECTIVES = {objective.name: objective for objective in (*FRESH, *TUNED)}
TRIAL_S = 60.0
#: By the names of the tables; those that take about a second a proposal are stopped after 100.
CONTESTANTS = (
    "auto",
    "gp",
    "evolution",
    "propulate",
    "cma-es",
    "random",
    "Optuna tpe",
    "Optuna cma-es",
    "Optuna gp",
    "SMAC3 forest",
)
MOST = {"Optuna gp": 100, "SMAC3 forest": 100}

#: One that proposes: ``propose(worker)`` begins a trial and returns its parameters, and what to call with its loss.
Told = Callable[[float], None]


class Ours:
    """One of Lockstep's algorithms, with a copy of it for each worker."""

    def __init__(self, words: str, space: Space, workers: int, seed: int) -> None:
        self._space = space
        self._algorithms = [make_algorithm(words, space, worker=worker, workers=workers) for worker in range(workers)]
        self._randoms = [np.random.default_rng([seed, worker]) for worker in range(workers)]
        self._running: dict[int, Point] = {}
        self._begun = self._ended = 0

    def propose(self, worker: int) -> tuple[dict[str, Any], Told]:
        """The parameters of the next trial of ``worker``."""
        algorithm = self._algorithms[worker]
        algorithm.inform([*self._running.values()], [], self._ended * TRIAL_S)
        proposal, number = algorithm.propose(self._randoms[worker]), self._begun
        self._begun += 1
        self._running[number] = proposal.point

        def tell(loss: float) -> None:
            self._running.pop(number)
            self._ended += 1
            made = Individual(
                number, proposal.point, (loss,), worker=worker, parents=proposal.parents, operator=proposal.operator
            )
            for each in self._algorithms:
                each.observe([made])

        return self._space.params(proposal.point), tell


class Optunas:
    """One of Optuna's samplers, which knows by itself what runs."""

    def __init__(self, sampler: str, space: Space, workers: int, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        made = {
            "tpe": lambda: optuna.samplers.TPESampler(multivariate=True, group=True, constant_liar=True, seed=seed),
            "cma-es": lambda: optuna.samplers.CmaEsSampler(seed=seed),
            "gp": lambda: optuna.samplers.GPSampler(seed=seed, deterministic_objective=True),
        }[sampler]
        self._space, self._study = space, optuna.create_study(sampler=made())

    def propose(self, worker: int) -> tuple[dict[str, Any], Told]:
        """The parameters of the next trial."""
        trial = self._study.ask()
        genes = [0.0] * len(self._space)
        for index, gene in enumerate(self._space.genes):
            if self._space.active(tuple(genes))[index]:
                of, name = gene.dimension, f"{index} {gene.name}"
                if isinstance(of, Choice):
                    value: Any = of.values[trial.suggest_categorical(name, tuple(range(len(of.values))))]
                elif isinstance(of, Float):
                    value = trial.suggest_float(name, of.low, of.high, log=of.log)
                else:
                    value = trial.suggest_int(name, of.low, of.high, log=of.log)
                genes[index] = of.gene(value)
        return self._space.params(tuple(genes)), lambda loss: self._study.tell(trial, loss) and None


class Smacs:
    """SMAC3's facade for hyperparameters, a random forest as its model."""

    def __init__(self, facade: str, space: Space, workers: int, seed: int) -> None:
        import tempfile

        import ConfigSpace
        from smac import HyperparameterOptimizationFacade, Scenario
        from smac.runhistory.dataclasses import TrialValue

        self._space, self._value = space, TrialValue
        self._names = [f"{index} {gene.name}" for index, gene in enumerate(space.genes)]
        configurations = ConfigSpace.ConfigurationSpace(seed=seed)
        made = []
        for name, gene in zip(self._names, space.genes, strict=True):
            of = gene.dimension
            if isinstance(of, Choice):
                made.append(ConfigSpace.CategoricalHyperparameter(name, list(range(len(of.values)))))
            else:
                kind = ConfigSpace.Float if isinstance(of, Float) else ConfigSpace.Integer
                made.append(kind(name, (of.low, of.high), log=of.log))
        configurations.add(made)
        for child, gene in zip(made, space.genes, strict=True):
            if gene.opened_by is not None:
                configurations.add(ConfigSpace.EqualsCondition(child, made[gene.opened_by[0]], gene.opened_by[1]))
        scenario = Scenario(
            configurations,
            deterministic=True,
            n_trials=10_000,
            seed=seed,
            output_directory=Path(tempfile.mkdtemp()),
        )
        design = HyperparameterOptimizationFacade.get_initial_design(scenario, n_configs=10)
        self._smac = HyperparameterOptimizationFacade(
            scenario, lambda config, seed: 0.0, initial_design=design, logging_level=50
        )

    def propose(self, worker: int) -> tuple[dict[str, Any], Told]:
        """The parameters of the next trial."""
        trial = self._smac.ask()
        genes = [0.0] * len(self._space)
        for index, gene in enumerate(self._space.genes):
            if self._space.active(tuple(genes))[index]:
                given = trial.config[self._names[index]]
                value = gene.dimension.values[int(given)] if isinstance(gene.dimension, Choice) else given
                genes[index] = gene.dimension.gene(int(given) if isinstance(gene.dimension, Int) else value)
        return self._space.params(tuple(genes)), lambda loss: self._smac.tell(trial, self._value(cost=loss))


def losses(objective: Objective, contestant: str, workers: int, evaluations: int, seed: int) -> Iterator[float]:
    """The losses of a search in their order."""
    kind, _, sampler = contestant.rpartition(" ")
    search = {"": Ours, "Optuna": Optunas, "SMAC3": Smacs}[kind](sampler, objective.space, workers, seed)
    in_hand: dict[int, tuple[dict[str, Any], Told]] = {}
    for turn in range(evaluations + workers):
        worker = turn % workers
        if worker in in_hand:
            params, tell = in_hand.pop(worker)
            loss = objective.loss(params)
            tell(loss)
            yield loss
        if turn < evaluations:
            in_hand[worker] = search.propose(worker)


def measured(asked: tuple[str, str, int, int, int]) -> dict[str, Any]:
    """One search: its best losses at the marks, and the seconds of CPU that each of its trials took."""
    name, contestant, workers, evaluations, seed = asked
    warnings.simplefilter("ignore")
    most, began = min(evaluations, MOST.get(contestant, evaluations)), time.process_time()
    found = [*losses(OBJECTIVES[name], contestant, workers, most, seed)]
    return {
        "objective": name,
        "contestant": contestant,
        "workers": workers,
        "seed": seed,
        "best": best_at(found, [mark for mark in MARKS if mark <= most]),
        "cpu_s": (time.process_time() - began) / most,
    }


def _key(row: dict[str, Any]) -> tuple[str, str, int, int]:
    return row["objective"], row["contestant"], row["workers"], row["seed"]


class Table:
    """What the searches found, by objective, contestant, number of workers and mark: medians over the rounds."""

    def __init__(self, rows: list[dict[str, Any]], names: list[str]) -> None:
        self._rows, self._names = [row for row in rows if row["objective"] in names], names
        best: dict[tuple[str, str, int, int], list[float]] = {}
        for row in self._rows:
            for mark, loss in row["best"].items():
                best.setdefault((row["objective"], row["contestant"], row["workers"], int(mark)), []).append(loss)
        self._medians = {key: statistics.median(found) for key, found in best.items()}
        met = {row["contestant"] for row in self._rows}
        self._contestants = [name for name in CONTESTANTS if name in met]
        self._columns = [
            (workers, mark) for workers in sorted({row["workers"] for row in self._rows}) for mark in MARKS
        ]

    def summary(self) -> str:
        """Mean ranks, the greatest ratios to the median of all, rounds and cost."""
        head = ["", *(f"{workers} w, {mark}" for workers, mark in self._columns)]
        ranks = [[who, *(self._rank(who, *column) for column in self._columns)] for who in self._contestants]
        ratios = [[who, *(self._ratio(who, *column) for column in self._columns)] for who in self._contestants]
        told = [
            f"{who} {1e3 * statistics.median(row['cpu_s'] for row in own):.0f} ms ({len({row['seed'] for row in own})})"
            for who in self._contestants
            for own in [[row for row in self._rows if row["contestant"] == who]]
        ]
        return (
            f"Mean rank over {len(self._names)} objectives:\n\n{_markdown([head, *ranks])}\n\n"
            f"The greatest ratio of a loss to the median of all:\n\n{_markdown([head, *ratios])}\n\n"
            f"CPU of a trial, the objective's included (and rounds): {', '.join(told)}."
        )

    def losses(self) -> str:
        """The losses themselves."""
        rows = [
            [name, str(workers), str(mark), *(self._cell(name, who, workers, mark) for who in self._contestants)]
            for name in self._names
            for workers, mark in self._columns
        ]
        return _markdown([["", "workers", "after", *self._contestants], *rows])

    def _cell(self, *key: Any) -> str:
        return f"{self._medians[key]:.3g}" if key in self._medians else "–"

    def _field(self, name: str, workers: int, mark: int) -> list[float]:
        keys = [(name, who, workers, mark) for who in self._contestants]
        return [self._medians[key] for key in keys if key in self._medians]

    def _own(self, who: str, workers: int, mark: int) -> dict[str, float]:
        keys = {name: (name, who, workers, mark) for name in self._names}
        return {name: self._medians[key] for name, key in keys.items() if key in self._medians}

    def _rank(self, who: str, workers: int, mark: int) -> str:
        places = [
            sum(0.5 * (other == loss) + (other < loss) for other in self._field(name, workers, mark)) + 0.5
            for name, loss in self._own(who, workers, mark).items()
        ]
        return f"{statistics.mean(places):.1f}" if places else "–"

    def _ratio(self, who: str, workers: int, mark: int) -> str:
        own = self._own(who, workers, mark)
        ratios = [loss / max(statistics.median(self._field(name, workers, mark)), 1e-9) for name, loss in own.items()]
        return f"{max(ratios):.2f}" if ratios else "–"


def _markdown(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))


def main() -> None:
    """Measures what the command line says, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", choices=["fresh", "tuned"], default="fresh")
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS, choices=CONTESTANTS)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10, help="seeds")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, default=Path("tune_few.jsonl"))
    parser.add_argument("--show", action="store_true", help="only what the file of results holds")
    parser.add_argument("--page", help="put ranks and ratios into this page, such as docs/search_measured.md")
    asked = parser.parse_args()
    names = [objective.name for objective in (FRESH if asked.objectives == "fresh" else TUNED)]
    rows = [*map(json.loads, asked.results.read_text().splitlines())] if asked.results.exists() else []
    if not asked.show:
        have = {_key(row) for row in rows}
        wanted = [
            (name, who, workers, asked.evaluations, seed)
            for seed in range(asked.rounds)
            for workers in asked.workers
            for who in asked.contestants
            for name in names
            if (name, who, workers, seed) not in have
        ]
        with ProcessPoolExecutor(asked.processes) as pool, asked.results.open("a") as file:
            for row in pool.map(measured, wanted):
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(*_key(row), file=sys.stderr, flush=True)
    table = Table([row for row in rows if row["contestant"] in asked.contestants], names)
    print(f"{table.summary()}\n\n{table.losses()}")
    if asked.page:
        from pages import circumstances, put  # late, for they need torch

        put(asked.page, "tune-few", f"{circumstances()}.\n\n{table.summary()}")


if __name__ == "__main__":
    main()
