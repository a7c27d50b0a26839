"""A script that opens several runs, one after another, such as one for each fold of a cross-validation."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import UsageError
from lockstep.launch_contract import RUN_DIR
from lockstep.testing import run_ranks

X = torch.sin(torch.arange(96.0)).view(48, 2)


class Interrupted(Exception):
    """What ends a training on purpose."""


def folds(interrupt_in=None):
    """On a rank: the weights of each fold; of those before ``interrupt_in``, whose run ends with an error."""
    found = []
    with contextlib.suppress(Interrupted):
        for fold in range(3):
            with lockstep.Run(seed=fold, save_every="1 step") as run:
                model = run.model(nn.Linear(2, 1))
                run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
                mine = torch.arange(48) % 3 != fold
                for _ in run.epochs(2):
                    for x in run.train(run.loader(X[mine], global_batch=8, micro_batch=2)):
                        if run.step(model(x).square().mean()) and (fold, run.progress.step) == (interrupt_in, 5):
                            raise Interrupted
                    run.log(fold=fold)
                found.append(model.weight.tolist())
    return found


def test_each_has_a_directory_and_goes_on_in_it(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    (alone,) = run_ranks(folds, 1, env={RUN_DIR: str(whole)})
    assert alone[0] != alone[1] != alone[2]
    assert run_ranks(folds, 2, 1, env={RUN_DIR: str(parts)}) == [alone[:1]] * 2
    assert not (parts / "run-3").exists()
    assert run_ranks(folds, 3, env={RUN_DIR: str(parts), "LOCKSTEP_RESUME": "1"}) == [alone] * 3
    for directory in (whole, parts):
        for fold, part in enumerate((directory, directory / "run-2", directory / "run-3")):
            rows = [json.loads(line) for line in Path(part, "metrics.jsonl").read_text().splitlines()]
            assert [row["fold"] for row in rows if "fold" in row] == [fold] * 2
            assert lockstep.load(part)["weight"].tolist() == alone[fold]


def test_the_last_checkpoint_holds_what_came_after_the_last_save(tmp_path):
    with lockstep.Run(checkpoint=tmp_path, save_every="1 step") as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x in run.train(run.loader(X, global_batch=8, micro_batch=2)):
            run.step(model(x).square().mean())
        with torch.no_grad():
            model.weight.fill_(7.0)  # such as the best weights
    assert lockstep.load(tmp_path)["weight"].tolist() == [[7.0, 7.0]]


def left_open():
    """On a rank: the weights of two folds, whose runs the script does not close, and what a closed run refuses."""
    found, runs = [], []
    for fold in range(2):
        run = lockstep.Run(seed=fold, save_every="1 step")
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(X, global_batch=8, micro_batch=2)
        for x in run.train(batches):
            run.step(model(x).square().mean())
        found.append(model.weight.tolist())
        runs.append((run, batches))
    run, batches = runs[0]
    uses = (run.epochs, run.train, run.evaluate, run.log, run.model)
    for use, given in zip(uses, ((3,), (batches,), (batches,), (), (nn.Linear(2, 1),)), strict=True):
        with pytest.raises(UsageError) as refused:
            next(iter(use(*given)))
        assert "this run is closed, by run.close(), " in str(refused.value)
    run.close()
    return found


def test_the_next_run_closes_one_that_is_open(tmp_path):
    (alone,) = run_ranks(left_open, 1, env={RUN_DIR: str(tmp_path / "one")})
    assert run_ranks(left_open, 2, env={RUN_DIR: str(tmp_path / "two")}) == [alone] * 2
    assert lockstep.load(tmp_path / "two")["weight"].tolist() == alone[0] != alone[1]
