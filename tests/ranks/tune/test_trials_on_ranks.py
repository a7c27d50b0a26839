"""Trials on worlds of several ranks: those that fail say why, the rest is right, and no loss depends on the ranks."""

import contextlib
import functools
import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.trial_contract import current_trial
from lockstep.tune import Choice, Float, Int, load
from searches import exit_code_of, started

SPACE = {"hidden": Int(4, 16), "lr": Float(1e-2, 1.0, log=True)}
#: So few that two searches try the same ones, whichever worker is first.
FEW = {"hidden": Int(4, 5), "lr": Choice(0.05, 0.2)}
FAILS = ("raise", "hang", "memory", "kill", "raise everywhere", "nan")


def points():
    """Points, and whether they are near the origin."""
    xy = torch.randn(128, 2, generator=torch.Generator().manual_seed(1))
    return xy, (xy.norm(dim=1) < 1).long()


def train(run, params, fails=()):
    """Three epochs; in the second, the first trials each fail in one of the ways that ``fails`` says."""
    trial = current_trial()
    how = fails[trial.number] if trial is not None and trial.number < len(fails) else ""
    model = run.model(nn.Sequential(nn.Linear(2, params["hidden"]), nn.Tanh(), nn.Linear(params["hidden"], 2)))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=params["lr"]))
    batches = run.loader(points(), global_batch=64, micro_batch=16)
    for epoch in run.epochs(3):
        for xy, near in run.train(batches):
            run.step(F.cross_entropy(model(xy), near))
        if epoch == 1:
            fail(how, is_last=run.rank == run.world_size - 1)
        run.report(run.metrics["loss"])
    return float("nan") if how == "nan" else run.metrics["loss"]


def draw_before_run(params):
    """A loss that all ranks draw before a run seeds them."""
    drawn = torch.rand(()).item()
    with lockstep.Run() as run:
        assert run.gather(drawn) == [drawn] * run.world_size
    return drawn


def search_of_draws(run_dir):
    lockstep.tune(draw_before_run, SPACE, trials=6, workers=2, ranks_per_worker=2, algorithm="random", run_dir=run_dir)


def test_what_a_trial_draws_depends_on_its_number_alone(tmp_path):
    drawn = []
    for name in ("once", "again"):
        searching = started(search_of_draws, tmp_path / name)
        assert exit_code_of(searching) == 0
        drawn.append([trial.loss for trial in load(tmp_path / name).trials])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 6


def fail(how, *, is_last):
    """Fail in the way ``how``."""
    if how == "raise everywhere":
        raise ValueError("boom everywhere")
    if is_last and how == "raise":
        raise RuntimeError("boom on one rank")
    if is_last and how == "memory":
        torch.empty(1 << 60)
    if is_last and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if is_last and how == "hang":
        time.sleep(10_000)


def search(run_dir, workers, ranks, trials, fails=(), space=SPACE):
    """A search of which the first trials fail."""
    lockstep.tune(
        functools.partial(train, fails=fails), space, trials=trials, workers=workers, ranks_per_worker=ranks,
        algorithm="random", run_dir=run_dir, hang_after_s=15.0 if fails else None, seed=4,
    )  # fmt: skip


def test_trials_that_fail_say_why_and_the_rest_is_right(tmp_path):
    mixed = started(search, tmp_path / "mixed", 2, 2, 10, FAILS)
    assert exit_code_of(mixed) == 0
    trials = load(tmp_path / "mixed").trials
    assert [trial.number for trial in trials] == list(range(10))
    failed, good = dict(zip(FAILS, trials, strict=False)), trials[len(FAILS) :]
    for how, words in {
        "raise": "rank 1 of 2 raised RuntimeError: boom on one rank (test_trials_on_ranks.py:",
        "hang": "rank 1 of 2 hung",
        "memory": "rank 1 of 2 raised RuntimeError",
        "kill": "rank 1 of 2 was killed by SIGKILL",
        "raise everywhere": "ValueError: boom everywhere (test_trials_on_ranks.py:",
        "nan": "the objective returned nan",
    }.items():
        assert failed[how].state == "failed"
        assert failed[how].reason.startswith(words)
    # A death from outside is tried once more, an error of the trial's own is not.
    assert {how: trial.attempts for how, trial in failed.items()} == {
        how: 1 + (how in ("kill", "hang")) for how in FAILS
    }
    assert all(trial.state == "done" and trial.attempts == 1 and len(trial.reports) == 3 for trial in good)
    # The same parameters on one rank, in this process: the same bits.
    with contextlib.chdir(tmp_path), lockstep.Run(seed=4) as run:
        assert train(run, good[0].params) == good[0].losses[0]


@pytest.mark.parametrize(("workers", "ranks"), [(4, 1), pytest.param(1, 3, marks=pytest.mark.campaign)])
def test_losses_do_not_depend_on_the_ranks(tmp_path, workers, ranks):
    for name, of in (("two", (2, 2)), ("other", (workers, ranks))):
        driver = started(search, tmp_path / name, *of, 6, space=FEW)
        assert exit_code_of(driver) == 0
    two, other = ({str(t.params): t.losses for t in load(tmp_path / name).trials} for name in ("two", "other"))
    both = two.keys() & other.keys()
    assert both
    assert {params: two[params] for params in both} == {params: other[params] for params in both}
