"""How good searches are after few trials: the best loss after 30, 60, 100 and 200, beside other searches.

python benchmarks/tune_few.py --results few.jsonl                # goes on where an earlier run with that file stopped
python benchmarks/tune_few.py --results few.jsonl --show         # its tables
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


def shown(rows: list[dict[str, Any]], names: list[str]) -> str:
    """The tables: ranks by workers and mark, the greatest ratio to the median, and the losses of each objective."""
    rows = [row for row in rows if row["objective"] in names]
    best: dict[tuple[str, str, int, int], list[float]] = {}
    for row in rows:
        for mark, loss in row["best"].items():
            best.setdefault((row["objective"], row["contestant"], row["workers"], int(mark)), []).append(loss)
    medians = {key: statistics.median(found) for key, found in best.items()}
    counts = sorted({row["workers"] for row in rows})
    contestants = [name for name in CONTESTANTS if any(row["contestant"] == name for row in rows)]
    columns = [(workers, mark) for workers in counts for mark in MARKS]
    head = " | ".join(f"{workers} w, {mark}" for workers, mark in columns)

    def field(name: str, workers: int, mark: int) -> list[float]:
        return [medians[name, who, workers, mark] for who in contestants if (name, who, workers, mark) in medians]

    ranks, behind = [], []
    for who in contestants:
        cells, ratios = [], []
        for workers, mark in columns:
            met = [name for name in names if (name, who, workers, mark) in medians]
            own = {name: medians[name, who, workers, mark] for name in met}
            places = [
                sum(0.5 * (other == own[name]) + (other < own[name]) for other in field(name, workers, mark)) + 0.5
                for name in met
            ]
            cells.append(f"{statistics.mean(places):.1f}" if met else "–")
            worst = [(own[name] / max(statistics.median(field(name, workers, mark)), 1e-9), name) for name in met]
            ratios.append("{:.2f} ({})".format(*max(worst)) if worst else "–")
        ranks.append(f"| {who} | {' | '.join(cells)} |")
        behind.append(f"| {who} | {' | '.join(ratios)} |")
    tables = ["Mean rank:", "", f"| | {head} |", "|---" * (len(columns) + 1) + "|", *ranks]
    tables += ["", "The greatest ratio to the median of all:", "", f"| | {head} |", "|---" * (len(columns) + 1) + "|"]
    tables += [*behind, "", "Medians of the best loss:", "", f"| | workers | after | {' | '.join(contestants)} |"]
    tables.append("|---" * (len(contestants) + 3) + "|")
    for name in names:
        for workers, mark in columns:
            cells = [
                f"{medians[name, who, workers, mark]:.3g}" if (name, who, workers, mark) in medians else "–"
                for who in contestants
            ]
            tables.append(f"| {name} | {workers} | {mark} | {' | '.join(cells)} |")
    cost = [
        f"{who} {1e3 * statistics.median(row['cpu_s'] for row in rows if row['contestant'] == who):.0f} ms"
        for who in contestants
    ]
    return "\n".join([*tables, "", f"CPU of a trial, the objective's included, median: {', '.join(cost)}."])


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
    print(shown([row for row in rows if row["contestant"] in asked.contestants], names))


if __name__ == "__main__":
    main()
