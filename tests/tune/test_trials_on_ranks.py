"""Trials on worlds of several ranks: those that fail say why, the rest is right, and no loss depends on the ranks."""

import contextlib
import os
import signal
import time

import pytest
import torch
from searches import started
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.tune import Choice, Float, Int, load

SPACE = {"hidden": Int(4, 16), "lr": Float(1e-2, 1.0, log=True), "fails": Choice("never")}
FAILS = ("raise", "hang", "memory", "kill", "raise everywhere", "nan")


def points():
    """Points, and whether they are near the origin."""
    xy = torch.randn(128, 2, generator=torch.Generator().manual_seed(1))
    return xy, (xy.norm(dim=1) < 1).long()


def train(run, params):
    """Three epochs; where ``fails`` says so, something happens on the last rank in the second."""
    model = run.model(nn.Sequential(nn.Linear(2, params["hidden"]), nn.Tanh(), nn.Linear(params["hidden"], 2)))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=params["lr"]))
    batches = run.loader(points(), global_batch=64, micro_batch=16)
    for epoch in run.epochs(3):
        for xy, near in run.train(batches):
            run.step(F.cross_entropy(model(xy), near))
        if epoch == 1:
            fail(params["fails"], is_last=run.rank == run.world_size - 1)
        run.report(run.metrics["loss"])
    return float("nan") if params["fails"] == "nan" else run.metrics["loss"]


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


class InTurn:
    """An algorithm that proposes given points, those that fail among them."""

    def __init__(self, space):
        self._space = space

    def observe(self, individuals):
        """Nothing is learnt."""

    def forget(self, numbers):
        """Nothing is known."""

    def propose(self, random):
        """Uniform."""
        return lockstep.tune.Proposal(self._space.sample(random))


def uniform(space, *, objectives, worker, workers):
    """A factory of one's own."""
    return InTurn(space)


def search(run_dir, workers, ranks, fails, trials):
    """A search some of whose trials fail."""
    lockstep.tune(
        train, SPACE | {"fails": Choice(*fails)}, trials=trials, workers=workers, ranks_per_worker=ranks,
        algorithm=uniform, run_dir=run_dir, hang_after_s=6.0, seed=4,
    )  # fmt: skip


def test_trials_that_fail_say_why_and_the_rest_is_right(tmp_path):
    mixed = started(search, tmp_path / "mixed", 2, 2, ("never", "never", *FAILS), 20)
    mixed.join(110)
    assert mixed.exitcode == 0
    result = load(tmp_path / "mixed")
    assert [trial.number for trial in result.trials] == list(range(20))
    said = {how: {t.reason for t in result.trials if t.params["fails"] == how} for how in ("never", *FAILS)}
    assert said["never"] == {""}
    for how, words in {
        "raise": "rank 1 of 2 raised RuntimeError: boom on one rank (test_trials_on_ranks.py:",
        "hang": "rank 1 of 2 hung",
        "memory": "rank 1 of 2 raised RuntimeError",
        "kill": "rank 1 of 2 was killed by SIGKILL",
        "raise everywhere": "ValueError: boom everywhere (test_trials_on_ranks.py:",
        "nan": "the objective returned nan",
    }.items():
        assert all(reason.startswith(words) for reason in said[how]), said
    assert sum(map(bool, said.values())) == len(said), f"choose another seed: {said}"
    # A death from outside is tried once more, an error of the trial's own is not.
    tries = {how: {t.attempts for t in result.trials if t.params["fails"] == how} for how in said}
    assert tries == {how: {2} if how in ("kill", "hang") else {1} for how in said}
    good = [trial for trial in result.trials if trial.params["fails"] == "never"]
    assert all(trial.state == "done" and len(trial.reports) == 3 for trial in good)
    # The same parameters on one rank, in this process: the same bits.
    best = min(good, key=lambda trial: trial.loss)
    with contextlib.chdir(tmp_path), lockstep.Run(seed=4) as run:
        assert train(run, best.params) == best.loss


@pytest.mark.parametrize(("workers", "ranks"), [(4, 1), (1, 3)])
def test_losses_do_not_depend_on_the_ranks(tmp_path, workers, ranks):
    for name, of in (("two", (2, 2)), ("other", (workers, ranks))):
        driver = started(search, tmp_path / name, *of, ("never",), 8)
        driver.join(100)
        assert driver.exitcode == 0
    two, other = ({str(t.params): t.losses for t in load(tmp_path / name).trials} for name in ("two", "other"))
    both = two.keys() & other.keys()
    assert both
    assert {params: two[params] for params in both} == {params: other[params] for params in both}
