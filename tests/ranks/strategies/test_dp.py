"""One process that divides each micro-batch among devices; here CPU threads stand in for GPUs."""

import threading
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.errors import SettingError, UsageError
from lockstep.run import Run
from lockstep.strategies.replicated.dp import CpuDataParallel
from worlds import on_world

Pair = namedtuple("Pair", "sum rows")


class Witness(nn.Module):
    """Says which thread computes which rows, in which modes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen = []
        self.register_buffer("rows", torch.tensor(0))

    def forward(self, x, scale=1.0, *, more=None):
        self.rows += len(x)
        self.seen.append((threading.get_ident(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        y = self.layer(x) * scale
        return {"out": y if more is None else y + more["offset"], "pair": Pair(y.sum(), [x])}


def test_rows_are_divided_and_put_together_again():
    model, x = Witness(), torch.randn(7, 3)
    offset = torch.randn(7, 2)
    found = CpuDataParallel(model, 3)(x, 2.0, more={"offset": offset})
    torch.testing.assert_close(found["out"], model.layer(x) * 2.0 + offset)
    assert isinstance(found["pair"], Pair)
    assert found["pair"].sum.shape == (3,)
    assert torch.equal(found["pair"].rows[0], x)


def test_gradients_are_those_of_the_whole_batch_and_buffers_those_of_the_first_device():
    model, x, y = Witness(), torch.randn(8, 3), torch.randn(8, 2)
    F.mse_loss(CpuDataParallel(model, 2)(x)["out"], y).backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    assert model.rows == 4
    F.mse_loss(model(x)["out"], y).backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("formats", [True, False])
def test_modes_reach_the_threads(gradients, formats):
    model = Witness()
    with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16, enabled=formats):
        found = CpuDataParallel(model, 2)(torch.randn(4, 3))
    ((thread, *modes),) = model.seen
    assert modes == [gradients, formats]
    assert thread != threading.get_ident()
    assert found["out"].requires_grad == gradients
    assert found["out"].dtype == (torch.bfloat16 if formats else torch.float32)


def test_fewer_rows_than_threads_are_computed_by_fewer():
    model = Witness()
    assert CpuDataParallel(model, 4)(torch.randn(1, 3))["out"].shape == (1, 2)
    assert model.seen[0][0] == threading.get_ident()


class Odd(nn.Module):
    def forward(self, x):
        return "text"


class Broken(nn.Module):
    def forward(self, x):
        raise ZeroDivisionError("in the user's module")


def test_what_goes_wrong_in_a_thread_is_raised():
    with pytest.raises(ZeroDivisionError, match="in the user's module"):
        CpuDataParallel(Broken(), 2)(torch.zeros(4))
    with pytest.raises(UsageError, match="strategy dp: the model returns a str, and outputs"):
        CpuDataParallel(Odd(), 2)(torch.zeros(4))


def learned(strategy, rehearse=True):
    random = torch.Generator().manual_seed(1)
    x, labels = torch.randn(20, 6, generator=random), torch.randint(3, (20,), generator=random)
    with Run(seed=2, strategy=strategy, rehearse=rehearse) as run:
        model = run.model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader((x, labels), global_batch=8, micro_batch=4)
        for _ in run.epochs(2):
            for inputs, targets in run.train(batches):
                run.step(F.cross_entropy(model(inputs), targets))
            for inputs, targets in run.evaluate(batches):
                run.measure(correct=model(inputs).argmax(1) == targets)
        return [p.detach().clone() for p in model.parameters()], run.metrics["correct"]


def test_it_trains_as_one_device_would():
    reference, correct = learned("none")
    for word in ("dp", "dp:devices=3", "dp:devices=1"):
        found, also_correct = learned(word)
        torch.testing.assert_close(found, reference, rtol=1e-5, atol=1e-6)
        assert also_correct == correct


def refused():
    with pytest.raises(SettingError) as caught:
        learned("dp")
    return str(caught.value)


def test_what_it_is_not_for_is_refused():
    with pytest.raises(SettingError, match=r"dp divides batches among GPUs, and there is none here.*--rehearse"):
        learned("dp", rehearse=False)
    with pytest.raises(SettingError, match="devices=-1; give a number from 1"):
        learned("dp:devices=-1")
    (said,) = on_world(2, [(refused,)])
    refusal = "strategy dp is one process for all GPUs, and there are 2 ranks; use ddp, or start one rank, which uses "
    assert said == [f"{refusal}them all: --nproc-per-node 1"] * 2
