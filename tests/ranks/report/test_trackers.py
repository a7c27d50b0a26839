"""Trackers get each row of the record once, and can neither stop nor slow a run."""

import resource
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lockstep.errors import SettingError
from lockstep.report import TrackerContext, open_trackers
from lockstep.report.trackers import tracker_thread
from lockstep.run import Run
from lockstep.testing import run_ranks
from waiting import wait_until

ROWS = [{"step": step, "epoch": 1, "wall_s": 1.5, "loss": 1 / step} for step in range(1, 6)]


class Points:
    """A script's own tracker."""

    def __init__(self):
        self.points, self.closed = [], False

    def log(self, values, step):
        self.points.append((step, values))

    def close(self):
        self.closed = True


def life(directory, tracker, *, record=(), rows=(), track=None, say=pytest.fail):
    (thread,) = open_trackers(
        track, tracker, TrackerContext(Path(directory), {"seed": 0}, record[-1]["step"] if record else 0), record, say
    )
    for row in rows:
        thread.log(row)
    thread.end()
    assert thread.has_ended(60)
    thread.close(60)
    return tracker


def test_a_row_comes_once_in_all_lives(tmp_path):
    first = life(tmp_path, Points(), rows=ROWS[:4])
    assert first.points == [(row["step"], {"epoch": 1, "loss": row["loss"]}) for row in ROWS[:4]]
    assert first.closed
    again = life(tmp_path, Points(), record=ROWS[:2], rows=ROWS[2:])  # resumed from step 2
    assert [step for step, _ in again.points] == [5]
    assert [step for step, _ in life(tmp_path, Points(), rows=ROWS).points] == [1, 2, 3, 4, 5], "a new run"
    (tmp_path / "trackers" / "Points.json").unlink()
    missed = life(tmp_path, Points(), record=ROWS[:4], rows=ROWS[4:])
    assert [step for step, _ in missed.points] == [1, 2, 3, 4, 5], "what it has never had comes from the record"


def wandb_records(content):
    """Of a file in the format of LevelDB's log: blocks of 32 KiB; checksum, length and kind before each part."""
    from wandb.proto import wandb_internal_pb2  # takes half a second, which the ranks need not wait for

    at, whole = 7, b""
    while at < len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def two_lives(directory):
    life(directory, None, track="wandb", rows=ROWS[:4])
    life(directory, None, track="wandb", record=ROWS[:2], rows=ROWS[2:])


def test_wandb_offline_is_one_run_with_each_point_once(tmp_path):
    run_ranks(two_lives, 1, tmp_path, env={"WANDB_MODE": "offline"})  # its service is a process that stays
    steps, ids = [], set()
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(file.read_bytes()):
            if record.WhichOneof("record_type") == "history":
                steps.append(record.history.step.num)
            elif record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
    assert steps == [1, 2, 3, 4, 5]
    assert len(ids) == 1


class Broken(Points):
    def log(self, values, step):
        raise OSError("no route to host\nand more")


class Hanging(Points):
    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def log(self, values, step):
        self.go.wait(60)


def trained(directory, tracker):
    with Run(checkpoint=directory, threads=1, track=tracker) as run:
        model = run.model(torch.nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(torch.ones(8, 1), global_batch=2, micro_batch=2, workers=0)
        for _ in run.epochs(2):
            for x in run.train(batches):
                run.step(model(x).mean())
                run.log()
    return run.progress.step


def test_what_fails_or_hangs_is_dropped_and_said_once(tmp_path, capsys, monkeypatch):
    assert trained(tmp_path / "broken", Broken()) == 8
    assert capsys.readouterr().err.count("tracker Broken is dropped: OSError: no route to host; metrics.jsonl") == 1
    assert trained(tmp_path / "well", well := Points()) == 8
    assert [step for step, _ in well.points] == [1, 2, 3, 4, 5, 6, 7, 8]
    monkeypatch.setattr(tracker_thread, "_MOST_WAITING", 3)
    hanging, began = Hanging(), time.monotonic()
    assert trained(tmp_path / "hanging", hanging) == 8
    assert time.monotonic() - began < 50
    hanging.go.set()
    assert capsys.readouterr().err.count("tracker Hanging is dropped: it does not take what was logged, 3 rows") == 1


TAKES = threading.Event()


class Waits(Points):
    """Takes a row while a micro-batch is tried a second time."""

    def log(self, values, step):
        TAKES.wait(60)
        super().log(values, step)


def test_a_row_that_is_taken_while_a_micro_batch_is_tried_is_not_put_back(tmp_path):
    tracker, steps = Waits(), []
    with Run(checkpoint=tmp_path, threads=1, track=tracker, check_every=1) as run:
        model = run.model(torch.nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x in run.train(run.loader(torch.ones(8, 1), global_batch=2, micro_batch=2, workers=0)):
            if not run.counts and run.progress.step:
                TAKES.set()
                wait_until(lambda: len(tracker.points) == run.progress.step, "the row of the step before")
            run.step(model(x).mean())
            if run.counts:
                TAKES.clear()
                run.log()
                steps.append(run.progress.step)
        TAKES.set()
    assert [step for step, _ in tracker.points] == steps == [1, 2, 3, 4]


class InFiles(Points):
    """Writes a file for each row, into a directory that may be away."""

    def __init__(self, place):
        super().__init__()
        self.place, self.tries = place, 0

    def log(self, values, step):
        self.tries += 1
        try:
            (self.place / str(step)).touch()
        except OSError as error:
            raise RuntimeError("the library says so in words of its own") from error
        super().log(values, step)


def test_rows_wait_while_the_disk_does_not_take_them_and_that_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tracker_thread, "_AGAIN_S", (0.01, 0.02))
    said = []
    tracker = InFiles(tmp_path / "place")
    (thread,) = open_trackers(None, tracker, TrackerContext(tmp_path, {}, 0), (), said.append)
    thread.log(ROWS[0])
    wait_until(lambda: tracker.tries > 2, "a row that is tried again")
    for row in ROWS[1:4]:
        thread.log(row)
    tracker.place.mkdir()
    wait_until(lambda: len(tracker.points) == 4, "the rows that have waited")
    thread.log(ROWS[4])
    thread.end()
    assert thread.has_ended(60)
    thread.close(60)
    assert [step for step, _ in tracker.points] == [1, 2, 3, 4, 5], "each once, in their order"
    (words,) = said
    assert words.startswith("tracker InFiles: RuntimeError: the library says so in words of its own; training goes on")
    life(tmp_path, InFiles(tmp_path / "never"), rows=ROWS, say=said.append)
    assert said[-1].startswith("tracker InFiles is dropped: RuntimeError: the library says so"), "at the end"


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # of the thread of TensorBoard itself
def test_tensorboard_goes_on_where_a_full_disk_has_stopped_it(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # takes a while

    monkeypatch.setattr(tracker_thread, "_AGAIN_S", (0.01, 0.02))
    said = []
    (thread,) = open_trackers("tensorboard", None, TrackerContext(tmp_path, {}, 0), (), said.append)
    note = tmp_path / "trackers" / "tensorboard.json"
    thread.log(ROWS[0])
    wait_until(lambda: note.exists() and '"rows": 1' in note.read_text(), "the first row")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        thread.log(ROWS[1])
        wait_until(lambda: thread._waits, "a row that cannot be written")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    for row in ROWS[2:]:
        thread.log(row)
    thread.end()
    assert thread.has_ended(60)
    thread.close(60)
    assert len(said) == 1
    assert "File too large" in said[0]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert sorted({event.step for event in events}) == [1, 2, 3, 4, 5]


def test_who_is_no_tracker_is_refused(tmp_path, monkeypatch):
    with pytest.raises(SettingError, match="tensorbord is no tracker; did you mean tensorboard"):
        Run(track="wandb, tensorbord")
    with pytest.raises(SettingError, match=r"track=int: give a tracker's name, or an object with log\(values, step\)"):
        Run(track=3)
    said = []
    monkeypatch.setitem(sys.modules, "mlflow", None)
    life(tmp_path, None, track="mlflow", rows=ROWS, say=said.append)
    assert len(said) == 1
    assert "ModuleNotFoundError" in said[0]
