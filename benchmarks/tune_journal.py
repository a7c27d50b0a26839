"""What a search of many trials costs: its journal read, the first proposal, a trial with its records, the summary.

python benchmarks/tune_journal.py
python benchmarks/tune_journal.py --trials 1000 100000 --page docs/search_measured.md

The journal is written by the package's own writer: four workers, three reports a trial, each trial ended. Then one more
worker goes on with it, in a process of its own for each number of trials, with `evolution` and the stopping rule
`asha`. Its objective costs nothing, so that the seconds are those of the search itself. They are seconds of a CPU:
other processes of the machine do not change them, and what a disk takes to flush a result is no part of them.
"""

import argparse
import contextlib
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import lockstep
from lockstep.tune import Choice, Float, Int, Space
from lockstep.tune.record.journal import JournalWriter, SearchPlan, read_search
from lockstep.tune.record.records import LossReported, TrialBegan, TrialEnded
from lockstep.tune.record.search_directory import Search, SearchDirectory, WorkerPlacement
from lockstep.tune.record.trial_claims import TrialClaims
from lockstep.tune.search_settings import SearchSettings
from lockstep.tune.workers.outcome import Outcome
from lockstep.tune.workers.search_worker import SearchWorker, TrialOrder
from pages import circumstances, markdown, put

SPACE = Space.of({"lr": Float(1e-4, 1, log=True), "layers": Int(1, 8), "kind": Choice("relu", "tanh")})
WORKERS, REPORTS, MORE = 4, 3, 50
SETTINGS = {"algorithm": "evolution", "stopping": "asha:eta=3,min=1", "keep_trials": 5}


def write_search(directory: Path, trials: int, draw: random.Random) -> None:
    """A search of which ``trials`` trials have ended, one after the other on each worker."""
    settings = SearchSettings(trials=trials + MORE, **SETTINGS)
    SearchPlan(SPACE.to_json(), settings.to_json() | {"workers": WORKERS, "options": {}}).write(directory)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(contextlib.closing(JournalWriter(directory, one))) for one in range(WORKERS)]
        claims = stack.enter_context(contextlib.closing(TrialClaims(directory)))
        for number in range(trials):
            worker, at_s = number % WORKERS, 1e9 + number
            claims.claim(worker, trials)
            point = SPACE.snap([draw.random() * width for width in SPACE.widths])
            writer, loss = writers[worker], draw.random()
            writer.append(
                TrialBegan(
                    number, 1, 1, at_s, SPACE.params(point), point, operator="uniform" if number < 20 else "crossover"
                )
            )
            for step in range(REPORTS):
                writer.append(LossReported(number, 1, step, loss + (REPORTS - step), at_s + step))
            writer.append(TrialEnded(number, 1, "done", at_s + REPORTS, REPORTS, (loss,), 0.0))


def evaluate(worker: SearchWorker, order: TrialOrder | None, trials: int) -> TrialOrder | None:
    """Evaluate ``order`` and what comes after it; returns what comes then."""
    for _ in range(trials):
        assert order is not None, "there are more"
        for step in range(REPORTS):
            worker.report(order, 1.0 - step / 10, step)
        worker.end(order, Outcome("done", (0.5,), 0.0))
        order = worker.next()
    return order


def go_on(directory: Path) -> dict[str, float]:
    """The seconds of a CPU of each part for a worker that goes on with the search."""
    began_s = time.process_time()
    read_search(directory)
    found = {"read": time.process_time() - began_s}
    trials = int(json.loads((directory / "search.json").read_text())["settings"]["trials"])
    began_s = time.process_time()
    search = Search(SPACE, SearchSettings(trials=trials, **SETTINGS), SearchDirectory(directory))
    placement = WorkerPlacement("", WORKERS, WORKERS, 0.0, {})
    worker = SearchWorker(search, placement, ranks=1, death=None, leave_at_s=math.inf)
    order = worker.next()
    found["first proposal"] = time.process_time() - began_s
    # The first one that a rule decides about sorts the losses of all; the last one looks for trials of others.
    order = evaluate(worker, order, 1)
    began_s = time.process_time()
    order = evaluate(worker, order, MORE - 2)
    found["a trial"] = (time.process_time() - began_s) / (MORE - 2)
    assert evaluate(worker, order, 1) is None
    assert worker.is_over
    worker.close()
    found["mebibytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def seconds_of_summary(directory: Path) -> float:
    """Of ``lockstep tune --show``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _python("-m", "lockstep", "tune", "--show", str(directory))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _python(*words: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(Path(lockstep.__file__).parents[1]), *sys.path))}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def measure(trials: int) -> dict[str, float]:
    """Of a search of so many trials: what each part takes, in seconds, and the memory of a worker."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place, "search")
        directory.mkdir()
        write_search(directory, trials, random.Random(0))
        size = sum(path.stat().st_size for path in directory.rglob("*.jsonl")) / 2**20
        summary = seconds_of_summary(directory)
        gone_on = json.loads(_python(__file__, "--go-on", str(directory)).splitlines()[-1])
        return {"trials": trials, "journal": size, **gone_on, "summary": summary}


def table(rows: Sequence[dict[str, float]]) -> str:
    """The rows as a page has them."""
    head = ("trials", "journal", "reading it", "first proposal", "a trial", "memory of a worker", "`--show`")
    cells = [
        (
            f"{row['trials']:.0f}",
            f"{row['journal']:.1f} MiB",
            f"{row['read']:.2f} s",
            f"{row['first proposal']:.2f} s",
            f"{row['a trial'] * 1000:.1f} ms",
            f"{row['mebibytes']:.0f} MiB",
            f"{row['summary']:.1f} s",
        )
        for row in rows
    ]
    return (
        f"{circumstances()}; {WORKERS} workers, {REPORTS} reports a trial; seconds of a CPU.\n\n{markdown(head, cells)}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, nargs="+", default=[1000, 10_000, 100_000], help="(default: 1e3 to 1e5)")
    parser.add_argument("--rounds", type=int, default=1, help="of which the least seconds count (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument(
        "--page", metavar="FILE", help="put the table there, between <!-- measured: tune-journal --> marks"
    )
    parser.add_argument("--go-on", metavar="DIR", help="measure one worker that goes on there, and print what it took")
    options = parser.parse_args()
    if options.go_on:
        print(json.dumps(go_on(Path(options.go_on))))
        return
    rows = []
    for trials in options.trials:
        rounds = [measure(trials) for _ in range(options.rounds)]
        rows.append({name: min(one[name] for one in rounds) for name in rounds[0]})
        print(table(rows[-1:]), file=sys.stderr, flush=True)
    print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    if options.page:
        put(options.page, "tune-journal", table(rows))


if __name__ == "__main__":
    main()
