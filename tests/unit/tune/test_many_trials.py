"""What a trial costs in a search of many: the lines that are executed are counted, and do not grow with the search."""

import math
import random
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.tune import Islands
from lockstep.tune.record.journal import JournalWriter, is_within_trial, journal_file, read_search
from lockstep.tune.record.records import LossReported
from lockstep.tune.record.search_directory import Search, SearchDirectory, WorkerPlacement
from lockstep.tune.search_settings import SearchSettings
from lockstep.tune.workers.outcome import Outcome
from lockstep.tune.workers.search_worker import SearchWorker

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PACKAGE = str(Path(lockstep.__file__).parent / "tune")


@pytest.fixture
def write_search(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from tune_journal import write_search

    return write_search


@pytest.fixture
def space(write_search):
    from tune_journal import SPACE

    return SPACE


class Lines:
    """How many lines of the package are executed within; each turn of a loop counts."""

    def __init__(self):
        self.count = 0

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _call(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame, event, argument):
        self.count += event == "line"
        return self._line


def worker_of(directory, space, trials, **options):
    settings = SearchSettings(trials=trials, **{"algorithm": "random", "keep_trials": 5, **options})
    search = Search(space, settings, SearchDirectory(directory))
    return SearchWorker(search, WorkerPlacement("", 0, 4, 0.0, {}), ranks=1, death=None, leave_at_s=math.inf)


def evaluate(worker, trials, state="done"):
    for _ in range(trials):
        order = worker.next()
        for step in range(3):
            worker.report(order, 0.5 - step / 10, step)
        (worker._directory.trial(order.number) / "checkpoints").mkdir(parents=True)
        worker.end(order, Outcome(state, (0.5,) if state == "done" else (), 0.0))


@pytest.mark.parametrize(
    "options",
    [
        {"stopping": "asha:eta=3,min=1", "patience": 10**6},
        {"stopping": "median:warmup=0 or static:margin=0.01"},
        {"stopping": "patience:2", "algorithm": "evolution"},
        {"repeats": 2, "stopping": None},
        {"islands": Islands(count=2, migration=1.0), "algorithm": None},
    ],
    ids="-".join,
)
def test_a_trial_costs_as_much_after_many_as_after_few(tmp_path, write_search, space, options):
    lines = []
    for trials in (100, 1000):
        directory = tmp_path / str(trials)
        directory.mkdir()
        write_search(directory, trials, random.Random(0))
        worker = worker_of(directory, space, trials + 50, **options)
        evaluate(worker, 10)
        with Lines() as counted:
            evaluate(worker, 10)
            evaluate(worker, 10, "failed")
        lines.append(counted.count)
        worker.close()
    assert lines[1] < 1.2 * lines[0], lines


def test_a_worker_that_opens_its_long_journal_reads_the_end_of_it(tmp_path, write_search):
    lines = []
    for trials in (100, 1000):
        directory = tmp_path / str(trials)
        directory.mkdir()
        write_search(directory, trials, random.Random(0))
        path = journal_file(directory, 0)
        before = read_search(directory)
        with path.open("ab") as file:
            file.write(b"a line that a crash has cut sh")
        with Lines() as counted:
            assert not is_within_trial(directory, 0)
            writer = JournalWriter(directory, 0)
            writer.append(LossReported(0, 1, 99, 1.0, 0.0))
            writer.close()
            assert is_within_trial(directory, 0)
        lines.append(counted.count)
        assert len(read_search(directory).trials) == len(before.trials)
        assert len(read_search(directory).trials[0].reports) == len(before.trials[0].reports) + 1
    assert lines[1] == lines[0]
