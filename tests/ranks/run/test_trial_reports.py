"""What a run is to a search: reports, one decision for all ranks, files of its own, weights of another trial."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep import Run
from lockstep.collectives import keeping_connections
from lockstep.errors import TrialStopped, UsageError
from lockstep.trial_contract import CurrentTrial, evaluating
from worlds import on_world


def epochs_of(run, epochs, model, leave_after=None):
    """Train, report each epoch's loss; returns what was reported."""
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    xy = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    batches = run.loader((xy, (xy.sum(1) > 0).long()), global_batch=32, micro_batch=8)
    said = []
    for epoch in run.epochs(epochs):
        for points, labels in run.train(batches):
            run.step(F.cross_entropy(model(points), labels))
        said.append(run.metrics["loss"])
        run.report(run.metrics["loss"])
        if epoch == leave_after:
            raise KeyboardInterrupt
    return said


def trial_of(directory, report, attempt=1, number=0, inherits=None):
    return CurrentTrial(number, directory / f"{number}", attempt, inherits, report)


def reports_of(directory, stop_at):
    """On a rank: a trial that is stopped, and what the leader was told."""
    told = []

    def report(loss, step):
        told.append((step, loss))
        return "hopeless" if step == stop_at else ""

    with keeping_connections():
        steps = []
        for number in range(2):  # the second trial finds the connections of the first
            trial = trial_of(directory, report, number=number)
            with contextlib.suppress(TrialStopped), evaluating(trial), Run(save_every="1000 steps") as run:
                epochs_of(run, 5, run.model(nn.Linear(2, 2)))
            steps.append(run.progress.step)
    return told, steps


def test_a_stop_is_decided_once_and_obeyed_by_all_ranks_at_the_same_step(tmp_path):
    alone, _ = on_world(1, [(reports_of, tmp_path / "1", 2)])[0][0]
    ranks = on_world(2, [(reports_of, tmp_path / "2", 2)])[0]
    told, steps = ranks[0]
    assert steps == ranks[1][1] == [6, 6]
    assert ranks[1][0] == []  # the leader alone is asked
    assert told == alone
    assert [step for step, _ in told] == [0, 1, 2] * 2
    assert told[:3] == told[3:]


def interrupted(directory, leave_after):
    """On a rank: an attempt that is cut, and one that goes on."""
    told = []
    with evaluating(trial_of(directory, lambda loss, step: told.append(step) or "")), pytest.raises(KeyboardInterrupt):  # noqa: SIM117
        with Run(save_every="1 epoch") as run:
            epochs_of(run, 4, run.model(nn.Linear(2, 2)), leave_after)
    return told


def gone_on(directory):
    told = []
    trial = trial_of(directory, lambda loss, step: told.append(step) or "", attempt=2)
    with evaluating(trial), Run() as run:
        losses = epochs_of(run, 4, run.model(nn.Linear(2, 2)))
    return told, losses


def whole(directory):
    with Run() as run:
        return epochs_of(run, 4, run.model(nn.Linear(2, 2)))


def test_a_trial_goes_on_with_another_number_of_ranks(tmp_path):
    assert on_world(2, [(interrupted, tmp_path, 2)])[0][0] == [0, 1, 2]
    (told, losses), expected = (one[0] for one in on_world(1, [(gone_on, tmp_path), (whole, tmp_path)]))
    # Reports are counted over all attempts, and repeated from the checkpoint on.
    assert told[-1] == 3
    assert told == list(range(told[0], 4))
    assert 0 < told[0] <= 3
    assert losses == expected[-len(losses) :]


def inheriting(directory):
    with evaluating(trial_of(directory, lambda loss, step: "")), Run() as run:
        model = run.model(nn.Linear(2, 2))
        epochs_of(run, 2, model)
    parents = {name: value.clone() for name, value in model.state_dict().items()}
    with evaluating(trial_of(directory, lambda loss, step: "", number=1, inherits=directory / "0")), Run(seed=5) as run:
        model = run.model(nn.Linear(2, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        list(run.epochs(0))
        return run.progress.step, all(torch.equal(parents[name], value) for name, value in model.state_dict().items())


def test_a_trial_begins_with_the_weights_of_another(tmp_path):
    assert on_world(2, [(inheriting, tmp_path)])[0] == [(0, True)] * 2


def outside():
    with Run() as run:
        losses = epochs_of(run, 2, run.model(nn.Linear(2, 2)))
        with pytest.raises(UsageError, match="give one number"):
            run.report("good")
    return losses


def test_outside_of_a_search_a_report_is_only_logged():
    assert len(on_world(1, [(outside,)])[0][0]) == 2
