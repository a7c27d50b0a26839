"""How many evaluations a second a search makes when an evaluation costs nothing, with every result on disk.

python benchmarks/tune_speed.py --propulate /path/to/python --optuna python
python benchmarks/tune_speed.py --workers 2 --evaluations 500 --rounds 3

Lockstep's `lockstep tune` with `evolution`, whose proposals cost next to nothing, as those of the others do, beside
Propulate under mpirun, with its default checkpoint of each generation, and Optuna with its random sampler and each of
its storages. The objective is the sphere of two parameters. Each search is timed from within, from its first evaluation
to its last, so that what it takes to start is left out. The ways take turns, in an order that changes from round to
round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import lockstep
from lockstep.tune import load
from pages import circumstances, markdown, put

OWN = "lockstep"
OURS = """
import lockstep
from lockstep.tune import Float

def sphere({arguments}):
    return params["x"] ** 2 + params["y"] ** 2

if __name__ == "__main__":
    lockstep.tune(sphere, {{"x": Float(-5.12, 5.12), "y": Float(-5.12, 5.12)}}, algorithm="evolution")
"""

PROPULATE = """
import json, logging, random, sys, time
from mpi4py import MPI
from propulate import Propulator
from propulate.utils import get_default_propagator

logging.disable(logging.CRITICAL)
comm, (evaluations, directory, seed) = MPI.COMM_WORLD, sys.argv[1:]
rng = random.Random(int(seed) + comm.rank)
limits = {"x": (-5.12, 5.12), "y": (-5.12, 5.12)}
search = Propulator(
    loss_fn=lambda point: point["x"] ** 2 + point["y"] ** 2,
    propagator=get_default_propagator(pop_size=2 * comm.size, limits=limits, rng=rng),
    rng=rng,
    generations=int(evaluations) // comm.size,
    checkpoint_path=directory,
)
comm.barrier()
began = time.perf_counter()
search.propulate(10**9, 0)
comm.barrier()
if comm.rank == 0:
    print(json.dumps({"seconds": time.perf_counter() - began}))
"""

OPTUNA = """
import json, sys, time
import optuna
from optuna.storages import InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend

optuna.logging.set_verbosity(optuna.logging.WARNING)
kind, evaluations, directory, seed = sys.argv[1:]
if kind == "memory":
    storage = InMemoryStorage()
elif kind == "sqlite":
    storage = f"sqlite:///{directory}/study.db"
else:
    storage = JournalStorage(JournalFileBackend(f"{directory}/study.log"))
study = optuna.create_study(
    study_name="speed", storage=storage, load_if_exists=True, sampler=optuna.samplers.RandomSampler(int(seed))
)
# All processes of a search begin together, once each has said that it is there.
print("ready", flush=True)
sys.stdin.readline()
began = time.time()
study.optimize(
    lambda trial: trial.suggest_float("x", -5.12, 5.12) ** 2 + trial.suggest_float("y", -5.12, 5.12) ** 2,
    n_trials=int(evaluations),
)
print(json.dumps({"began": began, "ended": time.time()}))
"""


#: Of these, which do ten to a hundred a second, a tenth of the evaluations tells as much.
SLOW = (f"{OWN}, each with a Run", "Optuna, journal", "Optuna, SQLite")


def lockstep_seconds(arguments: str, workers: int, evaluations: int, place: Path, seed: int) -> float:
    """Of `lockstep tune`, by its own journal, with an objective of these arguments."""
    (place / "search.py").write_text(OURS.format(arguments=arguments))
    options = {"--workers": workers, "--trials": evaluations, "--seed": seed, "--run-dir": place / "run"}
    words = [str(word) for option in options.items() for word in option]
    _run([sys.executable, "-m", "lockstep", "tune", *words, str(place / "search.py")])
    trials = load(place / "run").trials
    ended = [trial.ended_at_s for trial in trials if trial.state == "done"]
    assert len(ended) == evaluations, f"{len(ended)} of {evaluations} are done"
    return max(ended) - min(trial.began_at_s for trial in trials)


def propulate_seconds(python: str, workers: int, evaluations: int, place: Path, seed: int) -> float:
    """Of a `Propulator` under the mpirun that lies beside ``python``, or else of the system."""
    (place / "search.py").write_text(PROPULATE)
    beside = Path(python).parent / "mpirun"
    # Ranks that wait give way to others, where there are more of them than cores.
    settings = ["--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    command = [str(beside) if beside.exists() else "mpirun", *settings, "-n", str(workers), python]
    said = _run([*command, str(place / "search.py"), str(evaluations), str(place), str(seed)])
    return float(json.loads(said.splitlines()[-1])["seconds"])


def optuna_seconds(python: str, storage: str, workers: int, evaluations: int, place: Path, seed: int) -> float:
    """Of as many processes that share one study, each with a seed of its own."""
    (place / "search.py").write_text(OPTUNA)
    processes = []
    for worker in range(workers):
        words = [storage, str(evaluations // workers), str(place), str(seed * workers + worker)]
        process = subprocess.Popen(
            [python, str(place / "search.py"), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        process.stdout.readline()  # one after the other, since two that make the same file may fail
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    return max(one["ended"] for one in said) - min(one["began"] for one in said)


def _run(command: Sequence[str]) -> str:
    environment = os.environ | {
        "PYTHONPATH": str(Path(lockstep.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "LOCKSTEP_VIEW": "silent",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def ways_of(options: argparse.Namespace, workers: int) -> dict[str, Callable[[int, Path, int], float]]:
    """What is measured with so many workers, each as a function of evaluations, directory and seed."""
    ways: dict[str, Callable[[int, Path, int], float]] = {
        OWN: lambda n, place, seed: lockstep_seconds("params", workers, n, place, seed),
        f"{OWN}, each with a Run": lambda n, place, seed: lockstep_seconds("run, params", workers, n, place, seed),
    }
    if options.propulate:
        ways["Propulate"] = lambda n, place, seed: propulate_seconds(options.propulate, workers, n, place, seed)
    for storage, name in (("journal", "Optuna, journal"), ("sqlite", "Optuna, SQLite"), ("memory", "Optuna, memory")):
        if options.optuna and (workers == 1 or storage != "memory"):  # memory is that of one process
            ways[name] = lambda n, place, seed, kind=storage: optuna_seconds(  # type: ignore[misc]
                options.optuna, kind, workers, n, place, seed
            )
    return ways


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each number of workers and each way: evaluations per second of each round."""
    rows = []
    for workers in options.workers:
        ways = ways_of(options, workers)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(options.rounds):
            for name, seconds in list(ways.items())[:: 1 if number % 2 else -1]:
                count = options.evaluations // (10 if name in SLOW else 1) // workers * workers
                with tempfile.TemporaryDirectory() as place:
                    rates[name].append(count / seconds(count, Path(place), number))
                print(f"{workers} workers, {name}: {rates[name][-1]:.0f} a second", file=sys.stderr, flush=True)
        rows += [
            {
                "workers": workers,
                "way": name,
                "rates": rate,
                "median": median(rate),
                "ratio": median(ours / theirs for ours, theirs in zip(rates[OWN], rate, strict=True)),
            }
            for name, rate in rates.items()
        ]
    return rows


def table(rows: Sequence[dict], evaluations: int, rounds: int) -> str:
    """The rows as a page has them."""
    head = ("workers", "", "evaluations a second", "from", "to", "lockstep is faster by")
    cells = [
        (
            str(row["workers"]),
            str(row["way"]),
            f"{row['median']:.0f}",
            f"{min(row['rates']):.0f}",
            f"{max(row['rates']):.0f}",
            "" if row["way"] == OWN else f"{row['ratio']:.1f} times",
        )
        for row in rows
    ]
    how = f"median, least and most of {rounds} rounds, median of the rounds' ratios"
    return (
        f"{circumstances()}; {evaluations} evaluations, a tenth of them where there are fewer than 200 a second; {how}."
        f"\n\n{markdown(head, cells)}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--propulate", metavar="PYTHON", help="one that has propulate and mpi4py")
    parser.add_argument("--optuna", metavar="PYTHON", help="one that has optuna")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="(default: 1 2 4)")
    parser.add_argument("--evaluations", type=int, default=1000, help="(default: 1000)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument(
        "--page", metavar="FILE", help="put the table there, between <!-- measured: tune-speed --> marks"
    )
    options = parser.parse_args()
    rows = measure(options)
    text = table(rows, options.evaluations, options.rounds)
    print(text)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    if options.page:
        put(options.page, "tune-speed", text)


if __name__ == "__main__":
    main()
