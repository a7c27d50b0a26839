"""Other searches on the functions of `tune_functions`, each in an environment of its own: what `tune.py` starts.

python tune_peers.py optuna tpe --functions sphere step --evaluations 250 --rounds 3
mpirun -n 4 python tune_peers.py propulate default --functions sphere step --evaluations 2000 --rounds 3

Prints one line of JSON: by function, for each round, the best loss after each of the marks. Needs no Lockstep.
"""

import argparse
import json
import logging
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tune_functions import FUNCTIONS, Function, best_at

Losses = list[float]


def optuna_losses(sampler: str, function: Function, evaluations: int, seed: int) -> Losses:
    """The losses in their order, one evaluation after another, in memory."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kinds = {"tpe": "TPESampler", "cma-es": "CmaEsSampler", "nsga2": "NSGAIISampler", "random": "RandomSampler"}
    noise = np.random.default_rng([seed, 99])
    study = optuna.create_study(sampler=getattr(optuna.samplers, kinds[sampler])(seed=seed))
    names = [f"x{index}" for index in range(function.dimensions)]

    def objective(trial: optuna.Trial) -> float:
        return function(np.array([trial.suggest_float(name, -function.limit, function.limit) for name in names]), noise)

    study.optimize(objective, n_trials=evaluations)
    return [trial.values[0] for trial in study.trials]


def propulate_losses(_: str, function: Function, evaluations: int, seed: int) -> Losses:
    """The losses of all ranks, each rank's n-th beside those of the others; on rank 0 only."""
    from mpi4py import MPI
    from propulate import Propulator
    from propulate.utils import get_default_propagator

    world = MPI.COMM_WORLD
    noise, found = np.random.default_rng([seed, 99, world.rank]), Losses()
    limits = {f"x{index}": (-float(function.limit), float(function.limit)) for index in range(function.dimensions)}

    def loss(params: dict[str, float]) -> float:
        value = function(np.array([params[name] for name in limits]), noise)
        found.append(value)
        return value

    directory = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    rng = random.Random(1000 * seed + world.rank)
    propagator = get_default_propagator(pop_size=2 * world.size, limits=limits, rng=rng)
    Propulator(
        loss_fn=loss,
        propagator=propagator,
        rng=rng,
        generations=evaluations // world.size,
        checkpoint_path=Path(directory),
    ).propulate(logging_interval=10**9, debug=-1)
    gathered = world.gather(found)
    return [value for row in zip(*gathered, strict=True) for value in row] if gathered else []


PEERS: dict[str, Callable[[str, Function, int, int], Losses]] = {
    "optuna": optuna_losses,
    "propulate": propulate_losses,
}


def main() -> None:
    """Measures what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("algorithm")
    parser.add_argument("--functions", nargs="+", default=list(FUNCTIONS), choices=FUNCTIONS)
    parser.add_argument("--evaluations", type=int, default=2000)
    parser.add_argument("--marks", type=int, nargs="+", default=[250, 1000, 2000])
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    table: dict[str, list[dict[int, float]]] = {}
    for name in asked.functions:
        for seed in range(asked.rounds):
            losses = PEERS[asked.peer](asked.algorithm, FUNCTIONS[name], asked.evaluations, seed)
            if losses:
                table.setdefault(name, []).append(best_at(losses, asked.marks))
                print(f"{asked.peer} {asked.algorithm}: {name}, seed {seed}", file=sys.stderr, flush=True)
    if table:
        print(json.dumps(table))


if __name__ == "__main__":
    main()
