"""What cannot be trained alike on any number of ranks is refused where it is registered, by name, with the way out."""

import pytest
import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.run import Run
from worlds import on_world


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")


class NeedsClosure(torch.optim.SGD):
    """As SAM and its like."""

    def step(self, closure):
        closure()
        return super().step()


class OptionalClosure(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class WantsLoss:
    """A scheduler of somebody's own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, loss, *, epoch=None):
        pass


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def lbfgs(run):
    model = run.model(nn.Linear(2, 1))
    run.optimizer(sgd(model))
    run.optimizer(torch.optim.LBFGS(model.parameters()))


def closure(run):
    model = run.model(nn.Linear(2, 1))
    run.optimizer(NeedsClosure(model.parameters(), lr=0.1))
    run.optimizer(sgd(model))


def plateau(run):
    optimizer = run.optimizer(sgd(run.model(nn.Linear(2, 1))))
    run.scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def own_scheduler(run):
    run.scheduler(WantsLoss(run.optimizer(sgd(run.model(nn.Linear(2, 1))))))


def lazy(run):
    run.model(nn.Sequential(nn.LazyLinear(3), nn.ReLU()))


def lazy_buffer(run):
    module = nn.LazyBatchNorm1d(affine=False)
    run.model(module)


def model_twice(run):
    module = nn.Linear(2, 1)
    run.model(module)
    run.model(module)


def model_of_model(run):
    run.model(run.model(nn.Linear(2, 1)))


def shared_parameter(run):
    encoder = nn.Linear(2, 2)
    run.model(nn.Sequential(encoder, nn.Linear(2, 1)))
    run.model(nn.Sequential(nn.Tanh(), encoder))


def optimizer_twice(run):
    optimizer = run.optimizer(sgd(run.model(nn.Linear(2, 1))))
    run.optimizer(optimizer)


def expanded(run):
    module = nn.Module()
    module.scale = nn.Parameter(torch.ones(1, 3).expand(4, 3))
    run.model(module)


def expanded_buffer(run):
    module = nn.Linear(2, 1)
    module.register_buffer("mask", torch.ones(3).expand(4, 3), persistent=False)
    run.model(module)


def of_no_model(run):
    run.model(nn.Linear(2, 1))
    run.optimizer(sgd(nn.Linear(3, 1)))


REFUSED = {
    lbfgs: ("run.optimizer(LBFGS) beside SGD: an optimizer that computes the loss several times", "the run's only one"),
    closure: ("run.optimizer(SGD) beside NeedsClosure: an optimizer that computes the loss", "the run's only one"),
    plateau: ("ReduceLROnPlateau.step(metrics) needs metrics, and a run", "run.keep(scheduler=scheduler)"),
    own_scheduler: (
        "WantsLoss.step(loss) needs loss, and a run steps schedulers",
        "run.keep(scheduler=scheduler)",
    ),
    lazy: ("0.weight of Sequential is lazy and has no shape yet", "pass a batch through the model before run.model"),
    lazy_buffer: ("running_mean of LazyBatchNorm1d is lazy and has no shape yet", "or give the sizes when you make"),
    model_twice: ("run.model(Linear) a second time", "one call for each model, and what it returned is called"),
    model_of_model: ("run.model(Linear) a second time", "one call for each model, and what it returned is called"),
    shared_parameter: (
        "1.weight of Sequential belongs to another model of this run, too, where it is 0.weight",
        "Dict",
    ),
    optimizer_twice: ("run.optimizer(SGD) a second time", "one call for each optimizer"),
    expanded: ("scale of shape (4, 3) has strides (0, 1): several of its elements are one place", "use .clone() or"),
    expanded_buffer: (
        "mask of shape (4, 3) has strides (0, 1): several of its elements are one place",
        ".contiguous()",
    ),
    of_no_model: (
        "SGD holds 2 of 2 parameters that belong to no model of this run",
        "make it after `model = run.model",
    ),
}


def said(number, strategy="ddp"):
    """What is said of a registration; the run goes on without it."""
    with Run(strategy=strategy) as run:
        try:
            list(REFUSED)[number](run)
        except UsageError as error:
            return str(error)
    return ""


def fused_under_fsdp():
    with Run(strategy="fsdp") as run:
        model = run.model(nn.Linear(2, 2))
        try:
            run.optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        except UsageError as error:
            return str(error)
    return ""


def trains(strategy):
    """What looks alike and can be trained: an optional closure, a buffer expanded by 1, an initialised lazy module."""
    with Run(strategy=strategy) as run:
        module = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
        module(torch.zeros(1, 2))
        module[1].bias.requires_grad_(False)
        module.register_buffer("places", torch.arange(4).expand((1, -1)))
        model = run.model(module)
        optimizer = run.optimizer(OptionalClosure(model.parameters(), lr=0.1))
        run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        for x in run.train(run.loader(torch.ones(8, 2), global_batch=4, micro_batch=1)):
            run.step(model(x).square().mean())
        return run.progress.step


def test_it_is_refused_by_name_with_the_way_out():
    for world in (1, 2):
        calls = [(said, number) for number in range(len(REFUSED))]
        *results, fused, fine, fine_zero = on_world(
            world, [*calls, (fused_under_fsdp,), (trains, "ddp"), (trains, "zero")]
        )
        for (case, (what, remedy)), ranks in zip(REFUSED.items(), results, strict=True):
            for message in ranks:
                assert message.startswith(what), (case.__name__, message)
                assert remedy in message, (case.__name__, message)
        assert fine == fine_zero == [2] * world
        for message in fused:
            if world > 1:
                assert message.startswith("AdamW(fused=True): torch's fused kernels on CPUs know no divided tensors; ")
                assert message.endswith("or use ddp or zero")
