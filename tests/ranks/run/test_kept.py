"""`Run.keep` with plain values: saved, restored in place, compared between ranks."""

import os
from collections import deque

import pytest
import torch
from torch import nn

from lockstep.errors import CheckpointError, UsageError
from lockstep.run import Run
from worlds import on_world

X = torch.arange(16.0).view(16, 1)


def early_stopping(directory, resume, epochs, strategy="ddp", shift=0):
    """What is kept at the end; ``shift`` times the rank goes into it."""
    os.environ["LOCKSTEP_RESUME"] = str(int(resume))
    with Run(checkpoint=directory, strategy=strategy) as run:
        model = run.model(nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
        batches = run.loader(X, global_batch=8, micro_batch=2)
        seen, table, total = [0], {"best": {"epoch": None}, "rows": ()}, torch.zeros(2)
        inner, newest = table["best"], deque([0], maxlen=2)
        run.keep(best=float("inf"), seen=seen, table=table, total=total, note="", newest=newest)
        for epoch in run.epochs(epochs):
            for x in run.train(batches):
                if run.step(model(x).square().mean()):
                    total += run.progress.step
            run.kept.best = min(run.kept.best, run.metrics["loss"] + shift * run.rank)
            run.kept.note += str(epoch)
            seen.append(epoch)
            newest.append(epoch)
            inner["epoch"] = epoch
            table["rows"] += ((epoch, run.metrics["loss"]),)
        assert run.kept.seen is seen
        return run.kept.best, run.kept.note, seen, table, total.tolist(), newest


def test_it_resumes_in_place_on_any_world(tmp_path):
    one = str(tmp_path / "one"), str(tmp_path / "two")
    ((whole,),) = on_world(1, [(early_stopping, one[0], False, 4)])
    assert whole[1:3] == ("0123", [0, 0, 1, 2, 3])
    assert whole[3]["best"] == {"epoch": 3}
    assert whole[4] == [36.0, 36.0]
    assert whole[5] == deque([2, 3])
    assert whole[5].maxlen == 2
    on_world(2, [(early_stopping, one[1], False, 2)])
    first, served = on_world(
        3,
        [
            (early_stopping, one[1], True, 4),
            (early_stopping, str(tmp_path / "three"), False, 4, "parameter-server"),
        ],
    )
    assert first == [whole] * 3
    assert served[0][1:] == whole[1:], "a rank that serves keeps nothing of its own"


def test_ranks_that_keep_other_values_are_told(tmp_path):
    (told,) = on_world(2, [(early_stopping, str(tmp_path), False, 1, "ddp", 0.5)])
    assert all(
        "MismatchError: ranks hold different values after step 2: run.kept.best on rank" in text for text in told
    )


def other(directory, monkeypatch, **kept):
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    with Run(checkpoint=directory, threads=1) as run:
        model = run.model(nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
        run.keep(**kept)
        next(run.epochs(4), None)
        return run.kept


def test_what_does_not_fit_is_refused(tmp_path, monkeypatch):
    with Run(checkpoint=tmp_path, threads=1) as run:
        model = run.model(nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
        run.keep(best=0.5, seen=[1.0], weights=torch.ones(2), ema=nn.Linear(1, 1))
        for _ in run.epochs(1):
            pass
        run.kept.best = 1
        with pytest.raises(UsageError, match="an object with a state of its own"):
            run.kept.ema = nn.Linear(1, 1)
        with pytest.raises(UsageError, match=r"keep\(best=object\)"):
            run.kept.best = object()
        with pytest.raises(AttributeError, match=r"run.kept.bets: nothing is kept under that name, but best, ema"):
            run.kept.bets  # noqa: B018
        assert dir(run.kept) == ["best", "ema", "seen", "weights"]
    rest = {"seen": [], "weights": torch.zeros(2), "ema": nn.Linear(1, 1)}
    assert other(tmp_path, monkeypatch, best=None, **rest).best == 1
    with pytest.raises(
        CheckpointError, match=r"keep\(best=...\) of the checkpoint does not fit this script's list: a int"
    ):
        other(tmp_path, monkeypatch, best=[], **rest)
    with pytest.raises(CheckpointError, match=r"shape \(3,\), and \(2,\) was saved"):
        other(tmp_path, monkeypatch, best=0, **rest | {"weights": torch.zeros(3)})
