"""What real searches find: the examples' searches by `lockstep tune`, once with each algorithm in turn.

python benchmarks/tune_examples.py
python benchmarks/tune_examples.py --searches search_convnet --algorithms auto random --trials 30 --rounds 3

Each round is one search of each algorithm, one after another, with the round's seed: one worker, so that nothing but
the algorithm differs. Prints the best loss after so many trials, and after how many trials and seconds a search had
what random search ends with. Seconds hold what other programs on the machine cost.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lockstep.tune import SearchResult, load

EXAMPLES = Path(__file__).parents[1] / "examples"


def searched(search: str, algorithm: str, trials: int, seed: int, directory: Path) -> SearchResult:
    """The result of one search of an example."""
    options = ["--algorithm", algorithm, "--trials", str(trials), "--seed", str(seed), "--run-dir", str(directory)]
    command = [sys.executable, "-m", "lockstep", "tune", *options, str(EXAMPLES / f"{search}.py")]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return load(directory)


def best_after(result: SearchResult) -> list[tuple[float, float]]:
    """After each trial that has ended: the seconds since the beginning, and the best loss of a whole training."""
    ended = sorted((trial for trial in result.trials if trial.ended_at_s), key=lambda trial: trial.ended_at_s or 0.0)
    began, best, found = min(trial.began_at_s for trial in ended), float("inf"), []
    for trial in ended:
        if trial.losses and not trial.is_cut_short:
            best = min(best, trial.loss)
        found.append(((trial.ended_at_s or 0.0) - began, best))
    return found


def main() -> None:
    """Measures what the command line says, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", nargs="+", default=["search_digits", "search_convnet"])
    parser.add_argument("--algorithms", nargs="+", default=["auto", "evolution", "random"])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3, help="seeds")
    asked = parser.parse_args()
    marks = [mark for mark in (10, 20, 30, 40, 60, 100) if mark <= asked.trials]
    print(f"| search | algorithm | {' | '.join(f'after {mark}' for mark in marks)} | as good as random after |")
    print("|---" * (len(marks) + 3) + "|")
    for search in asked.searches:
        curves: dict[str, list[list[tuple[float, float]]]] = {}
        for seed in range(asked.rounds):
            for algorithm in asked.algorithms:
                with tempfile.TemporaryDirectory() as made:
                    result = searched(search, algorithm, asked.trials, seed, Path(made, "search"))
                curves.setdefault(algorithm, []).append(best_after(result))
                print(search, algorithm, seed, result.best.loss, file=sys.stderr, flush=True)
        target = statistics.median(curve[-1][1] for curve in curves.get("random", [*curves.values()][-1]))
        for algorithm, rounds in curves.items():
            losses = " | ".join(f"{statistics.median(curve[mark - 1][1] for curve in rounds):.4f}" for mark in marks)
            reached = [
                next(((count + 1, at_s) for count, (at_s, loss) in enumerate(curve) if loss <= target), None)
                for curve in rounds
            ]
            known = [each for each in reached if each is not None]
            told = (
                f"{statistics.median(count for count, _ in known):g} trials, "
                f"{statistics.median(at_s for _, at_s in known):.0f} s ({len(known)} of {len(rounds)})"
                if known
                else f"never ({len(rounds)})"
            )
            print(f"| {search} | {algorithm} | {losses} | {told} |", flush=True)


if __name__ == "__main__":
    main()
