"""How good the searches are: the best loss after equal numbers of evaluations, beside Propulate and Optuna.

python benchmarks/tune.py
python benchmarks/tune.py --functions rastrigin schwefel --ours evolution propulate --rounds 9 --evaluations 4000
python benchmarks/tune.py --optuna /path/to/python --propulate /path/to/python --mpirun /path/to/mpirun

Ours are simulated in this process: so many workers, each with an algorithm and a generator of its own, take turns; a
worker proposes without the results of those that the others have in hand, so all but one of the workers' last results
are unknown to it. That is the delay that workers of equal speed have; nothing is timed. Propulate (its default
propagator on one island, 2 individuals for each rank) runs as it is, under MPI, with as many ranks. Optuna's
samplers run one evaluation after another, which favours them.

The peers need pythons of their own: one with propulate 1.2.2, mpi4py, an MPI and GPy; one with optuna 5 and cmaes.
Those that are not given are left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lockstep.tune.search import (
    Float,
    Individual,
    Islands,
    Residents,
    Space,
    make_algorithm,
    plan_emigration,
    plan_replacement,
)
from tune_functions import FUNCTIONS, Function, best_at

Rounds = list[dict[int, float]]
PEERS = Path(__file__).with_name("tune_peers.py")


def simulated(function: Function, islands: Islands, workers: int, evaluations: int, seed: int) -> list[float]:
    """The losses of a search in their order."""
    space = Space.of({f"x{index}": Float(-function.limit, function.limit) for index in range(function.dimensions)})
    noise = np.random.default_rng([seed, 99])
    generators = [np.random.default_rng([seed, worker]) for worker in range(workers)]
    residents = Residents()
    algorithms = []
    for worker in range(workers):
        colleagues = islands.workers_of(islands.island_of(worker), workers)
        words = islands.algorithm_of(islands.island_of(worker))
        algorithms.append(make_algorithm(words, space, worker=worker, workers=len(colleagues)))
    in_hand, losses = {}, []
    for turn in range(evaluations + workers):
        worker = turn % workers
        if worker in in_hand:
            number, proposal = in_hand.pop(worker)
            losses.append(function((2 * np.array(proposal.point) - 1) * function.limit, noise))
            residents.add_individual(
                Individual(
                    number,
                    proposal.point,
                    (losses[-1],),
                    island=islands.island_of(worker),
                    worker=worker,
                    parents=proposal.parents,
                    operator=proposal.operator,
                )
            )
            moves = (
                *plan_emigration(islands, residents, worker, workers, generators[worker]),
                *plan_replacement(islands, residents, worker, generators[worker]),
            )
            for move in moves:
                residents.add_move(move)
            for island in range(islands.count):
                came, gone = residents.take_changes(island)
                for each in islands.workers_of(island, workers):
                    algorithms[each].observe(came)
                    algorithms[each].forget(gone)
        if turn < evaluations:
            in_hand[worker] = turn, algorithms[worker].propose(generators[worker])
    return losses


def ours(words: str, asked: argparse.Namespace) -> dict[str, Rounds]:
    """Every function, each round with its own seed; ``words`` may begin with a number of islands, as in 2xevolution."""
    count, times, algorithm = words.partition("x")
    islands = (
        Islands(count=int(count), algorithms=(algorithm,))
        if times and count.isdigit()
        else Islands(algorithms=(words,))
    )
    return {
        name: [
            best_at(simulated(FUNCTIONS[name], islands, asked.workers, asked.evaluations, seed), asked.marks)
            for seed in range(asked.rounds)
        ]
        for name in asked.functions
    }


def peer(command: list[str], asked: argparse.Namespace, evaluations: int) -> dict[str, Rounds]:
    """What `tune_peers.py` prints, started by ``command``."""
    options = ["--evaluations", str(evaluations), "--rounds", str(asked.rounds)]
    marks = ["--marks", *(str(mark) for mark in asked.marks), "--functions", *asked.functions]
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | single
    done = subprocess.run([*command, *options, *marks], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    table = json.loads(done.stdout.splitlines()[-1])
    return {name: [{int(mark): best for mark, best in row.items()} for row in rows] for name, rows in table.items()}


def contestants(asked: argparse.Namespace) -> dict[str, Callable[[], dict[str, Rounds]]]:
    """Who is compared, and how each is measured; says whom it leaves out."""
    found: dict[str, Callable[[], dict[str, Rounds]]] = {
        words: lambda words=words: ours(words, asked) for words in asked.ours
    }
    if asked.propulate:
        ranks = [*asked.mpirun.split(), "-n", str(asked.workers), asked.propulate, str(PEERS)]
        found["Propulate 1.2.2"] = lambda: peer([*ranks, "propulate", "default"], asked, asked.evaluations)
    else:
        print("Propulate is left out: --propulate names a python that has it", file=sys.stderr)
    if asked.optuna:
        for sampler in asked.samplers:
            most = min(asked.evaluations, asked.most_tpe) if sampler == "tpe" else asked.evaluations
            found[f"Optuna {sampler}"] = lambda sampler=sampler, most=most: peer(
                [asked.optuna, str(PEERS), "optuna", sampler], asked, most
            )
    else:
        print("Optuna is left out: --optuna names a python that has it", file=sys.stderr)
    return found


def shown(best: dict[str, dict[str, Rounds]], asked: argparse.Namespace) -> str:
    """A table: a row for each contestant and mark, medians over the rounds."""
    lines = [f"| | after | {' | '.join(asked.functions)} |", "|---" * (2 + len(asked.functions)) + "|"]
    for who, table in best.items():
        for mark in asked.marks:
            medians = [
                statistics.median(row[mark] for row in table[name]) if mark in table[name][0] else None
                for name in asked.functions
            ]
            if any(median is not None for median in medians):
                cells = " | ".join("–" if median is None else f"{median:.2g}" for median in medians)
                lines.append(f"| {who} | {mark} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Measures what the command line says, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", nargs="+", default=list(FUNCTIONS), choices=FUNCTIONS)
    parser.add_argument("--ours", nargs="*", default=["evolution", "2xevolution", "propulate", "cma-es"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--evaluations", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5, help="seeds")
    parser.add_argument("--propulate", help="a python with propulate and mpi4py")
    parser.add_argument("--mpirun", default="mpirun --oversubscribe", help="with its options")
    parser.add_argument("--optuna", help="a python with optuna and cmaes")
    parser.add_argument("--samplers", nargs="+", default=["tpe", "cma-es", "nsga2", "random"])
    parser.add_argument("--most-tpe", type=int, default=250, help="evaluations of TPE, each of which takes long")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    asked.marks = sorted({mark for mark in (250, 1000, 2000) if mark < asked.evaluations} | {asked.evaluations})
    best = {}
    for who, measure in contestants(asked).items():
        best[who] = measure()
        print(f"{who}: done", file=sys.stderr, flush=True)
    print(shown(best, asked))
    if asked.json:
        asked.json.write_text(json.dumps(best))


if __name__ == "__main__":
    main()
