"""Optimizers with closures, losses of several passes: equal on any world, near plain torch on the whole batch."""

import os

import pytest
import torch
from torch import nn

from campaign_marks import IN_CAMPAIGN
from lockstep.errors import UsageError
from lockstep.run import Run
from lockstep.testing import state_hash
from worlds import on_world

X = torch.randn(44, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1, keepdim=True) + X[:, :1] ** 2).tanh()
SIZES = {"global_batch": 16, "micro_batch": 4}  # 3 steps an epoch, the last one of 3 micro-batches


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization around SGD, as implementations with a closure are: gradients are there before."""

    def __init__(self, parameters, lr=0.1, rho=0.05):
        super().__init__(parameters, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                self.state[p]["before"], self.state[p]["first"] = p.clone(), p.grad
                p.add_(p.grad * group["rho"] / norm)
                p.grad = None
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad is not self.state[p]["first"]
                p.copy_(self.state[p].pop("before")).sub_(p.grad + 0 * self.state[p].pop("first"), alpha=group["lr"])


OPTIMIZERS = {
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
    "sam": Sam,
}


def net(dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def trained(name, epochs=2, dropout=0.0, counts=False, strategy="ddp", directory=None, resume=False):
    os.environ["LOCKSTEP_RESUME"] = str(int(resume))
    with Run(strategy=strategy, checkpoint=directory, save_every="1 step" if directory else None) as run:
        module = net(dropout)
        model = run.model(module)
        optimizer = run.optimizer(OPTIMIZERS[name](model.parameters()), closure=True)
        batches = run.loader(torch.utils.data.TensorDataset(X, Y), shuffle=False, workers=0, **SIZES)
        losses = []
        for _ in run.epochs(epochs):
            for x, y in run.train(batches):
                run.step(nn.functional.mse_loss, x, y, count=2 * len(x) if counts else None)
            losses.append(run.metrics["loss"])
        return state_hash(module, optimizer), losses, torch.nn.utils.parameters_to_vector(module.parameters()).tolist()


def by_hand(name):
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(2):
        for x, y in zip(X.split(16), Y.split(16), strict=True):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                with torch.enable_grad():
                    loss = nn.functional.mse_loss(model(x), y)
                    loss.backward()
                return loss

            closure()
            optimizer.step(closure)
    return torch.nn.utils.parameters_to_vector(model.parameters()).tolist()


def test_the_same_bits_on_any_world_near_plain_torch_and_after_a_resume(tmp_path):
    cases = [
        (trained, name, 2, dropout, counts) for name in OPTIMIZERS for dropout, counts in ((0.0, False), (0.3, True))
    ]
    started = (trained, "lbfgs", 1, 0.3, True, "ddp", str(tmp_path / "saved"))
    alone = [alone for (alone,) in on_world(1, cases)]
    _, *two = on_world(2, [started, *(cases if IN_CAMPAIGN else ())])
    resumed, *three = on_world(3, [(*started[:2], 2, *started[3:], True), *cases])
    for results in (two, three) if two else (three,):
        for (_, name, *_), found, ranks in zip(cases, alone, results, strict=True):
            assert [bits for bits, *_ in ranks] == [found[0]] * len(ranks), (name, results)
    for (_, name, _, dropout, _), found in zip(cases, alone, strict=True):
        if not dropout:
            assert found[2] == pytest.approx(by_hand(name), rel=1e-3, abs=1e-5)
    assert resumed[0][0] == alone[1][0]
    assert resumed[0][1] == alone[1][1], "saved after the last step of the epoch, whose means it tells again"


def refused(strategy="ddp", precision="fp32", second=False):
    def script():
        run.optimizer(optimizer)
        if second:
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x in run.train(run.loader(X, **SIZES)):
            run.step(model(x).mean())

    with Run(strategy=strategy, precision=precision) as run:
        model = run.model(net())
        optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(UsageError) as error:
            script()
        return str(error.value)


def penalized(strategy):
    """A gradient penalty: the loss depends on the gradient of the output with respect to the input."""
    with Run(strategy=strategy) as run:
        module = net()
        model = run.model(module)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        batches = run.loader(torch.utils.data.TensorDataset(X, Y), shuffle=False, workers=0, **SIZES)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                run.step(penalty(model, x, y))
        return run.metrics["loss"]


def penalty(model, x, y):
    x.requires_grad_(True)
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return nn.functional.mse_loss(out, y) + (slope.norm(dim=1) - 1).square().mean()


def penalized_by_hand():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        losses = []
        for x, y in zip(X.split(16), Y.split(16), strict=True):
            optimizer.zero_grad()
            loss = penalty(model, x.clone(), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item() * len(x))
    return sum(losses) / len(X)


def test_a_gradient_penalty_is_that_of_plain_torch():
    strategies = ["ddp", "zero", "fsdp"]
    worlds = {world: on_world(world, [(penalized, strategy) for strategy in strategies]) for world in (1, 2)}
    assert worlds[1][0][0] == pytest.approx(penalized_by_hand(), rel=1e-5)
    ddp, zero, (fsdp, _) = worlds[2]
    assert ddp == zero == worlds[1][0] * 2
    assert "UsageError: the loss depends on gradients that were computed before" in fsdp


def differentiated_twice():
    def script():
        for x in run.train(run.loader(X, **SIZES)):
            x.requires_grad_(True)
            torch.autograd.grad(model(x).sum(), x, create_graph=True)

    with Run(strategy="fsdp") as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(UsageError) as error:
            script()
        return str(error.value)


def test_what_cannot_be_is_refused_by_name():
    (said, *others, twice) = [
        ranks[0]
        for ranks in on_world(
            2,
            [
                (refused,),
                (refused, "ddp", "fp16"),
                (refused, "ddp", "fp32", True),
                *((refused, s) for s in ("zero", "fsdp", "local-sgd", "ddp:compress=fp16", "parameter-server")),
                (differentiated_twice,),
            ],
        )
    ]
    assert "run.step(F.cross_entropy, images, labels)" in said
    assert "fp16" in others[0]
    assert "must be the run's only one" in others[1]
    assert "gradients that were computed before" in twice, "before anything reads what fully_shard has freed"
    for text in others[2:]:
        assert "does not support: use --strategy ddp" in text, text
