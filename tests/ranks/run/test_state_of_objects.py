"""What changes beside parameters and buffers: modes, attributes, schedulers; beside plain torch, and after a resume."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from lockstep.errors import UsageError
from lockstep.run import Run
from lockstep.run.state.attributes import Attributes, RunAttributes
from lockstep.run.state.training_modes import TrainingModes, modes_of, restore
from lockstep.testing import state_hash
from worlds import on_world

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(16) % 3
SIZES = {"global_batch": 8, "micro_batch": 4, "shuffle": False}


@pytest.fixture(autouse=True)
def _not_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_RESUME", "0")  # and put back, whatever a test sets


class FrozenNorm(nn.Module):
    """Freezes BatchNorm as many packages do; counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.calls: list[bool] = []

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.bn.eval()
        self.calls.append(mode)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.bn(self.a(x)))


class Merges(nn.Linear):
    """Merges its low-rank part into the weight for evaluations, as LoRA does."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.low, self.merged = nn.Parameter(torch.full((3, 4), 0.5)), False

    def train(self, mode: bool = True) -> Merges:
        if mode == self.merged:
            self.weight.data += self.low.data * (-1 if mode else 1)
            self.merged = not mode
        super().train(mode)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight if self.merged else self.weight + self.low, self.bias)


@pytest.mark.parametrize("kind", [FrozenNorm, Merges])
def test_train_and_eval_are_called_as_a_loop_by_hand_calls_them(kind: type[nn.Module]) -> None:
    def trained(*, by_hand: bool) -> tuple[str, list[bool]]:
        torch.manual_seed(0)
        model: Any = kind()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if by_hand:
            for _ in range(2):
                model.train()
                for x, y in zip(X.split(8), Y.split(8), strict=True):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                model.eval()
            model.train()
        else:
            with Run(seed=0) as run:
                run.model(model)
                run.optimizer(optimizer)
                batches, held = (run.loader((X, Y), global_batch=8, micro_batch=8, shuffle=False) for _ in range(2))
                for _ in run.epochs(2):
                    for x, y in run.train(batches):
                        run.step(F.cross_entropy(model(x), y))
                    for x, _ in run.evaluate(held):
                        model(x)
        return state_hash(model.state_dict()), [*getattr(model, "calls", [])]

    plain, ours = trained(by_hand=True), trained(by_hand=False)
    assert ours[0] == plain[0]
    assert ours[1].count(False) == plain[1].count(False)
    assert ours[1][:1] == plain[1][:1]


def test_what_the_script_has_set_to_eval_stays_so_and_what_a_module_sets_is_its_own() -> None:
    model = FrozenNorm()
    modes = TrainingModes(model)
    modes.begin_pass()
    assert [model.training, model.a.training, model.bn.training] == [True, True, False]
    model.a.eval()
    model.train = lambda mode=True: nn.Module.train(model, mode)  # type: ignore[method-assign]  # thaws BatchNorm
    modes.begin_pass()
    assert [model.training, model.a.training, model.bn.training] == [True, False, True]
    modes.begin_pass()
    assert not model.a.training
    saved = modes.state()
    assert saved == {"eval": ["a"], "frozen": ["a"]}
    model.a.train()
    modes.begin_pass()
    assert model.a.training
    model.eval()  # the whole: by a loop of its own
    modes.begin_pass()
    assert model.a.training
    other = FrozenNorm()
    assert set(TrainingModes(other).load(saved)) == {"a"}
    assert [other.a.training, other.bn.training] == [False, True]
    ((_, before),) = modes_of([other])
    other.eval()
    restore(other, before)
    assert [other.training, other.a.training, other.bn.training] == [True, False, True]


class Counts(torch.optim.SGD):
    """Has a count, slow weights and a schedule of its own in attributes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.t = 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.t += 1
        if self.t % 2 == 0:
            for p, slow in zip(self.param_groups[0]["params"], self.slow[0], strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.drop, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)
        self.tau, self.seen = 2.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.b(self.drop(self.bn(self.a(x)))) / self.tau
        self.seen = len(x)
        return self.last


def with_hidden_state(root: str, until: int | None) -> tuple[str, Any]:
    """Everything that no state_dict has is changed between epochs or by the optimizer."""
    os.environ["LOCKSTEP_RESUME"] = "1"
    with Run(seed=3, checkpoint=root) as run:
        model = run.model(Net())
        optimizer = run.optimizer(Counts(model.parameters()))
        warm = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        optimizer.param_groups[0]["weight_decay"] = np.float32(0.01)
        batches = run.loader((X, Y), **SIZES)
        for epoch in run.epochs(4):
            if epoch == 1:
                model.bn.eval()
            for x, y in run.train(batches):
                run.step(F.cross_entropy(model(x), y))
                if run.progress.step == until:
                    break
            if run.progress.step == until:
                break
            model.drop.p *= 0.5
            model.tau *= 0.75
            warm.step()
        decay = optimizer.param_groups[0]["weight_decay"]
        found = (model.drop.p, model.tau, optimizer.t, warm.last_epoch, model.bn.training, type(decay).__name__)
        return state_hash({**model.state_dict(), "slow": optimizer.slow}), found


@pytest.mark.parametrize("until", [3, 5, 6])
def test_it_goes_on_after_a_resume(tmp_path: Any, until: int) -> None:
    whole = with_hidden_state(str(tmp_path / "whole"), None)
    with_hidden_state(str(tmp_path / "legs"), until)
    assert with_hidden_state(str(tmp_path / "legs"), None) == whole
    assert whole[1] == (0.5 / 16, 2 * 0.75**4, 8, 4, False, "float32")


def test_it_goes_on_after_a_resume_on_another_world(tmp_path: Any) -> None:
    whole = with_hidden_state(str(tmp_path / "whole"), None)
    on_world(2, [(with_hidden_state, str(tmp_path / "legs"), 5)])
    assert on_world(2, [(with_hidden_state, str(tmp_path / "legs"), None)])[0] == [whole] * 2


def test_attributes_of_a_forward_pass_and_of_caches_are_no_state() -> None:
    model = Net()
    model(X)
    attributes = RunAttributes([model], {}, [], torch.device("cpu"))
    attributes.begin_body()
    model(X[:3]).sum().backward()
    attributes.end_of_body()
    model(X[:5])
    assert attributes.state() == {"modules": {}, "optimizers": {}}
    model.tau, model.drop.p = 1.0, 0.25
    assert attributes.state()["modules"] == {"0:": {"tau": 1.0}, "0:drop": {"p": 0.25}}
    model.cache = torch.zeros(1 << 20)
    assert attributes.state()["modules"] == {"0:drop": {"p": 0.25}}, "of a cache a part would be worse than nothing"
    attributes.load({"modules": {"0:": {"tau": 0.5}}})
    assert (model.tau, model.drop.p) == (0.5, 0.5), "what is not saved is what it was at first"


CHANGES: dict[str, tuple[Any, Any]] = {
    "a tensor that is new": (None, torch.ones(2)),
    "numbers of NumPy": (np.float32(1), np.float32(2)),
    "a table": ({"a": [1, 2]}, {"a": [1, 3], "b": (None, 0.5)}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_value_comes_back(name: str) -> None:
    first, now = CHANGES[name]
    module: Any = nn.Identity()
    module.value = first
    attributes = Attributes(module, is_module=True)
    module.value = now
    saved = attributes.state()
    module.value = first
    attributes.load(saved, torch.device("cpu"))
    assert str(module.value) == str(now)
    assert type(module.value) is type(now)


class Draws(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.generator = torch.Generator()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.rand(1, generator=self.generator)
        super().step()


class SwapsWeights(torch.optim.SGD):
    def eval(self) -> None:
        """Writes the weights that are to be evaluated."""


def refused(
    kind: Callable[..., torch.optim.Optimizer], change: Callable[[Run, nn.Module], object], **settings: Any
) -> None:
    with Run(seed=0, **settings) as run:
        model = run.model(Net())
        queue = torch.zeros(2)
        run.keep(queue=queue)
        run.optimizer(kind(model.parameters()))
        if change is converted:
            model.double()
        batches = run.loader((X, Y), **SIZES)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                if run.step(F.cross_entropy(model(x), y)) and change is rebound:
                    queue = torch.cat([queue, torch.ones(1)])[-2:]
            change(run, model)


def nothing(run: Run, model: nn.Module) -> None:
    """Changes nothing."""


def converted(run: Run, model: nn.Module) -> None:
    """Before the loop."""


def rebound(run: Run, model: nn.Module) -> None:
    """In the body."""


def renamed(run: Run, model: nn.Module) -> None:
    if not hasattr(model.a, "weight_orig"):
        prune.identity(model.a, "weight")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (Draws, nothing, "Draws.generator has changed since the training began, and is a Generator that cannot be"),
        (sgd, converted, r"a.weight of Net was torch.float32 when run.model\(...\) was called, and is torch.float64"),
        (sgd, rebound, r"queue is another Tensor .*run.keep\(queue=...\).* queue.copy_\(...\) under"),
        (sgd, renamed, "a.weight, a.weight_orig of Net came or went since the training began"),
    ],
)
def test_what_cannot_be_saved_is_said_when_it_changes(tmp_path: Any, kind: Any, change: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        refused(kind, change, checkpoint=str(tmp_path))


def test_optimizers_that_swap_weights_are_refused_where_their_state_lies_apart() -> None:
    (told,) = on_world(2, [(refused, SwapsWeights, nothing)], env={"LOCKSTEP_STRATEGY": "zero"})
    assert all("SwapsWeights.eval() computes the weights to be evaluated" in text for text in told), told
