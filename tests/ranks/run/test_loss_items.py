"""A loss that is no mean over samples is told, and with the advice a step has the gradient of plain torch."""

import contextlib
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.run import Run
from worlds import on_world

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 1, 1, 0, 0, 2, 1, 1, 0, 2] * 2)  # each two have one that is not 2
WEIGHT = torch.tensor([1.0, 2.0, 5.0])
LR = 0.1


def masked(out, y):
    each, mask = F.cross_entropy(out, y, reduction="none"), y != 2
    return (each * mask).sum() / mask.sum()


def elbo(out, y, samples=1):
    """As a variational autoencoder: two sums over the batch."""
    return F.cross_entropy(out, y, reduction="sum") + 0.5 * torch.sum(out**2)


#: Each loss of a whole batch in plain torch; what a step adds for micro-batches; and words of the line without that.
TOLD = {
    "weight": (
        lambda out, y: F.cross_entropy(out, y, weight=WEIGHT),
        lambda out, y: {"count": (1000 * WEIGHT[y].sum()).round()},
        "count=(1000 * weight[labels].sum()).round()",
    ),
    "ignore_index": (
        lambda out, y: F.cross_entropy(out, y, ignore_index=2),
        lambda out, y: {"count": (y != 2).sum()},
        "count=(labels != 2).sum()",
    ),
    "mask": (masked, lambda out, y: {"count": (y != 2).sum()}, "count=mask.sum()"),
    "selected": (
        lambda out, y: F.cross_entropy(out[y != 2], y[y != 2]),
        lambda out, y: {"count": (y != 2).sum()},
        "count=labels.numel()",
    ),
    "mean of a selection": (
        lambda out, y: F.cross_entropy(out, y, reduction="none")[y != 2].mean() + 1e-3,
        lambda out, y: {"count": (y != 2).sum()},
        "count=losses.numel()",
    ),
    "smoothed": (
        lambda out, y: F.cross_entropy(out, y, weight=WEIGHT, label_smoothing=0.1) * 2,
        lambda out, y: {"count": WEIGHT[y].sum()},
        "weight[labels]",
    ),
    "sum": (
        lambda out, y: F.cross_entropy(out, y, reduction="sum"),
        lambda out, y: {"loss_is": "sum", "times": 12},
        "run.step(12 * loss, loss_is='sum')",
    ),
    "sums": (elbo, lambda out, y: {"loss_is": "sum", "times": 12}, "the loss is a sum over the 2 samples"),
    "sum over the step's samples": (
        lambda out, y: elbo(out, y) / 12,
        lambda out, y: {"loss_is": "sum", "times": 12},
        "the loss is divided by 12, the samples of a step, and a micro-batch holds 2",
    ),
}

#: As for gradient accumulation by hand, with six micro-batches in a step.
DIVIDED = {
    "divided": lambda out, y: F.cross_entropy(out, y) / 6,
    "share": lambda out, y: out.square().mean() * (1 / 6),
}
#: Means over samples, with terms that are none of their business.
MEANS = {
    "mean": F.cross_entropy,
    "sum by length": lambda out, y: F.cross_entropy(out, y, reduction="none").sum() / len(y),
    "product by length": lambda out, y: F.cross_entropy(out, y, reduction="none").sum() * (1 / len(y)),
    "sum of losses by length": lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(y),
    "sum by elements": lambda out, y: out.repeat(1, 2).square().sum() / (2 * out.numel()),  # 12 in a micro-batch
    "sums of each": lambda out, y: out.square().sum(1).mean(),
    "batchmean": lambda out, y: F.kl_div(out.log_softmax(1), F.one_hot(y, 3).float(), reduction="batchmean"),
    "probabilities": lambda out, y: F.cross_entropy(out, F.one_hot(y, 3).float()),
    "of each class": lambda out, y: F.cross_entropy(out, y) + out.mean(0).sum() * 0.1,
    "terms": lambda out, y: torch.stack([F.cross_entropy(out, y), out.square().mean()]).sum() / 4,
    "mean of terms": lambda out, y: torch.stack([F.cross_entropy(out, y), out.square().mean()]).mean(),
    "weight of a mean": lambda out, y: F.cross_entropy(out, y) / 4,
    "weight of terms": lambda out, y: (F.cross_entropy(out, y) + out.square().mean()) / 6,
    "each sample's": lambda out, y: torch.stack([one.mean() for one in out]).mean(),
}

#: Losses in which the samples of a micro-batch meet.
MEETING = {
    "root": lambda out, y: F.mse_loss(out, F.one_hot(y, 3).float()).sqrt(),
    "dice": lambda out, y: F.cross_entropy(out, y) + 1 - out.sigmoid()[:, 0].sum() / (out.sigmoid().sum() + 1),
    "hardest": lambda out, y: F.cross_entropy(out, y, reduction="none").topk(1).values.mean(),
    "pairs": lambda out, y: F.mse_loss(out @ out.T, torch.eye(len(out))),
}


def make_net():
    torch.manual_seed(1)
    return nn.Linear(6, 3)


def trained(name, advised=False, micro_batch=2, penalty=False):
    """The weights after four steps of 12 samples, and the lines that this rank has told about the loss."""
    means = MEANS | DIVIDED | MEETING
    loss, options = (means[name], None) if name in means else TOLD[name][:2]
    net = make_net()
    with contextlib.redirect_stderr(io.StringIO()) as said, Run(replay=name in TOLD | MEETING and not advised) as run:
        model = run.model(net)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=LR))
        loader = run.loader((X, Y), global_batch=12, micro_batch=micro_batch, shuffle=False)
        for _ in run.epochs(2):
            for x, y in run.train(loader):
                out = model(x)
                given = options(out, y) if advised else {}
                value = loss(out, y) * given.pop("times", 1)
                if penalty:
                    value = value + 1e-9 * sum(p.square().sum() for p in model.parameters())
                run.step(value, **given)
        weights = run.state_dict(model)
    words = ("the loss is a mean over", "loss is a sum over", "the loss is divided by", "the loss is no mean over")
    return weights, [line for line in said.getvalue().splitlines() if any(each in line for each in words)]


def by_hand(name):
    loss = (MEANS | MEETING)[name] if name in MEANS | MEETING else TOLD[name][0]
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(2):
        for begin in range(0, 24, 12):
            optimizer.zero_grad()
            loss(model(X[begin : begin + 12]), Y[begin : begin + 12]).backward()
            optimizer.step()
    return model.state_dict()


def assert_as_by_hand(name, weights):
    for key, value in by_hand(name).items():
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-6)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")


def test_it_is_told_once_and_with_the_advice_the_training_is_that_of_plain_torch():
    results = on_world(2, [(trained, name, advised, 2, not advised) for name in TOLD for advised in (False, True)])
    for (name, (_, _, words)), (leaders, others) in zip(TOLD.items(), results[::2], strict=True):
        (line,) = leaders[1]
        assert words in line, name
        assert not others[1]
    for name, ((weights, lines), _) in zip(TOLD, results[1::2], strict=True):
        assert not lines
        assert_as_by_hand(name, weights)


def test_a_mean_over_samples_is_not_told_and_is_that_of_plain_torch():
    for name, ((weights, lines), _) in zip(MEANS, on_world(2, [(trained, name) for name in MEANS]), strict=True):
        assert not lines, name
        assert_as_by_hand(name, weights)


def test_a_step_of_one_micro_batch_is_that_of_plain_torch():
    for name, ((weights, lines),) in zip(TOLD, on_world(1, [(trained, name, False, 12) for name in TOLD]), strict=True):
        assert not lines, name
        assert_as_by_hand(name, weights)


def test_a_loss_in_which_samples_meet_is_told_and_with_the_advice_is_that_of_plain_torch():
    results = on_world(2, [(trained, name) for name in MEETING])
    advised = on_world(1, [(trained, name, False, 12) for name in MEETING])
    for name, told, ((weights, lines),) in zip(MEETING, results, advised, strict=True):
        (line,) = (line for _, found in told for line in found)  # the leader's
        assert line.startswith("the loss is no mean over samples:")
        assert "2 samples meet, and not the 12 of a step" in line
        assert "with micro_batch=12 the loss is that of one GPU" in line
        assert lines == []
        assert_as_by_hand(name, weights)


def test_a_mean_that_is_divided_by_the_micro_batches_is_told():
    for world, name in ((1, "divided"), (2, "share")):
        ((_, (line,)), *_) = on_world(world, [(trained, name)])[0]
        assert "the loss is divided by 6, the micro-batches of a step" in line
