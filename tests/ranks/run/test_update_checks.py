"""What a script does with gradients and optimizers is what it is on one rank, or is refused with the way out."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.errors import MismatchError, UsageError
from lockstep.run import Run
from lockstep.run.checks.update_checks import mixes_parameters
from lockstep.strategies.not_whole import partial_models
from lockstep.testing import run_each, state_hash
from worlds import on_world

X = torch.linspace(-1, 1, 96).view(24, 4)
Y = torch.arange(24) % 3
SIZES = {"global_batch": 12, "micro_batch": 3}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


class OfAll(torch.optim.Optimizer):
    """Clips by the norm of all gradients, as Adan and NVIDIA's LAMB do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        learning = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in learning]).norm()
        for p in learning:
            p.sub_(p.grad * (0.2 / norm).clamp(max=1), alpha=0.1)


class Estimates(torch.optim.Optimizer):
    """Learns one number from all parameters, which shows in the step after, as Prodigy does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"d": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            learning = [p for p in group["params"] if p.grad is not None]
            for p in learning:
                p.sub_(p.grad.sign(), alpha=group["d"])
            group["d"] = max([group["d"], *(1e-4 * p.grad.norm().item() for p in learning)])


class Langevin(torch.optim.SGD):
    """Draws for one parameter after the other."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


class NotToBeCopied(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, 0.1)
        self.lock = __import__("threading").Lock()


ADAMS = [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax]
OTHERS = [torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adadelta]


@pytest.mark.parametrize("kind", [*ADAMS, *OTHERS, torch.optim.SGD, torch.optim.Adafactor, NotToBeCopied])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_optimizer_that_steps_each_parameter_by_itself_is_taken_for_one_that_mixes_them(kind, dtype):
    model = net().to(dtype)
    for groups in (
        model.parameters(),
        [{"params": [model[0].weight]}, {"params": [model[0].bias, model[2].bias]}, {"params": [model[2].weight]}],
        [model[0].weight],
    ):
        assert not mixes_parameters(kind(groups), ())
    tables = nn.ModuleList([nn.Embedding(3, 2, sparse=True), nn.Embedding(3, 2, sparse=True)])
    assert not mixes_parameters(torch.optim.SparseAdam(tables.parameters()), set(tables.parameters()))


def test_one_in_the_middle_of_a_training_stays_as_it_is():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True, foreach=True)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        calls = []
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        scheduler.step()
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]])
    assert not mixes_parameters(optimizer, ())
    after = [model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]]
    assert state_hash(before) == state_hash(after)
    assert calls == [1]


@pytest.mark.parametrize("kind", [OfAll, Estimates, Langevin])
def test_one_that_mixes_parameters_is_found(kind):
    model = net()
    assert mixes_parameters(kind(model.parameters()), ())
    assert mixes_parameters(kind([model[0].weight, model[2].bias]), ())


# ---- by ranks ----------------------------------------------------------------------------------------------------


def train(strategy, body=None, *, make=net, optimizer=None, hook=None, prepare=None, replay=True):
    """A hash of the trained model, whole on rank 0, by the forward pass of the run or of the script."""
    with Run(seed=3, strategy=strategy, replay=replay) as run:
        model = run.model(make())
        optimizer = run.optimizer((optimizer or sgd)(model.parameters()))
        if hook is not None:
            optimizer.register_step_pre_hook(hook)
        if prepare is not None:
            model = prepare(model)
        for _ in run.epochs(2):
            for x, y in run.train(run.loader((X, Y), **SIZES)):
                if body is None:
                    run.step(F.cross_entropy, x, y)
                else:
                    body(run, model, x, y)
        state = run.state_dict(model)
        return state_hash(state) if run.leads else None


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def langevin(parameters):
    return Langevin(parameters, lr=0.1)


def noisy(run, model, x, y):
    if run.backward(F.cross_entropy(model(x), y)):
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn_like(parameter), alpha=0.1)
    run.update()


def by_rank(run, model, x, y):
    if run.backward(F.cross_entropy(model(x), y)):
        model[2].bias.grad.add_(run.rank)
    run.update()


def clipped(run, model, x, y):
    if run.backward(F.cross_entropy, x, y):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    run.update()


def draw(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(torch.rand(()))


def ddp(model):
    return nn.parallel.DistributedDataParallel(model)


class Limited(nn.Linear):
    """Writes to its weight in forward(), as into nothing where that is a copy."""

    def forward(self, x):
        self.weight.data.clamp_(min=0)
        return super().forward(x)


class Follows(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.centre = nn.Linear(4, 3), nn.Parameter(torch.zeros(2, 3), requires_grad=False)

    def forward(self, x):
        x = self.first(x)
        self.centre.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.centre.mean(0)


def limited():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Limited(5, 3))


def called(run, model, x, y):
    run.step(F.cross_entropy(model(x), y))


class Looks(nn.Sequential):
    """A hook of the last module writes to a buffer of the model."""

    def __init__(self):
        super().__init__(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.register_buffer("seen", torch.zeros(3))
        self[2].register_forward_hook(self.look)

    def look(self, module, args, output):
        self.seen.add_(output.detach().mean(0))


def slower(run, model, x, y):
    if run.step(F.cross_entropy(model(x), y)):
        for optimizer in run._context.state.optimizers:
            optimizer.param_groups[0]["lr"] *= 0.5


def squares(run, model, x, y):
    run.step(F.cross_entropy(model(x), y) + sum(p.pow(2).sum() * torch.ones(()) for p in model.parameters()))


#: The bits of one rank.
SAME = {
    "noise": ({"body": noisy}, ("ddp", "zero", "fsdp", "zero:stage=2")),
    "noise in a hook": ({"hook": draw}, ("ddp",)),
    "noise of an optimizer": ({"optimizer": langevin}, ("ddp",)),
    "of all": ({"optimizer": OfAll}, ("ddp", "fsdp", "zero:stage=2", "parameter-server")),
    "clipped": ({"body": clipped}, ("ddp", "zero", "fsdp")),
}
#: What is said.
REFUSED = {
    "clipped": ({"body": clipped}, ("pipeline",), UsageError, "no rank has all gradients"),
    "hook": ({"hook": draw}, ("zero", "pipeline"), UsageError, "SGD has a hook of its step"),
    "of all": ({"optimizer": OfAll}, ("zero", "pipeline"), UsageError, "OfAll computes a step of one"),
    "draws": ({"optimizer": langevin}, ("zero", "pipeline"), UsageError, "Langevin computes a step of one"),
    "by rank": ({"body": by_rank}, ("zero",), MismatchError, "before the update of step 1: gradients.0.2.bias on rank"),
    "wrapped": ({"prepare": ddp}, ("ddp", "zero"), UsageError, "DistributedDataParallel around a model of this run"),
    "limited": (
        {"make": limited, "body": called},
        ("ddp", "fsdp", "zero:stage=2"),
        UsageError,
        "parametrization (torch.nn.utils.parametrize)",
    ),
    "follows": (
        {"make": Follows, "body": called},
        ("ddp", "fsdp", "zero:stage=2"),
        UsageError,
        "such as a codebook",
    ),
    "slower": (
        {"body": slower},
        ("parameter-server",),
        UsageError,
        "lr of group 0 is 0.05 on rank 0 and 0.1 on rank 1",
    ),
    "squares": ({"body": squares}, ("fsdp",), RuntimeError, "weight_decay= of the optimizer"),
}


#: Said on a rank while another one waits for it: in a world that ends then.
REFUSED_AT_LAST = {"looks": ({"make": Looks}, ("pipeline",), UsageError, "the buffer seen was changed by a stage")}


def refused(strategy, of_one, kind):
    with pytest.raises(kind) as caught:
        train(strategy, **of_one)
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_on_two_ranks_gradients_are_those_of_one_rank_or_the_script_is_refused():
    alone = dict(zip(SAME, on_world(1, [(_train_one, "none", name) for name in SAME]), strict=True))
    same = [(name, strategy) for name, (_, strategies) in SAME.items() for strategy in strategies]
    said = [(name, strategy) for name, (_, strategies, *_) in REFUSED.items() for strategy in strategies]
    results = on_world(2, [(_train_one, s, n) for n, s in same] + [(_refused_one, s, n) for n, s in said])
    for (name, strategy), by_ranks in zip(same, results, strict=False):
        assert by_ranks[0] == alone[name][0], (name, strategy, by_ranks[0])
    for (name, strategy), by_ranks in zip(said, results[len(same) :], strict=True):
        words = REFUSED[name][3]
        assert any(words in text for text in by_ranks), (name, strategy, by_ranks)


@pytest.mark.parametrize("name", REFUSED_AT_LAST)
def test_what_a_rank_refuses_while_others_wait_for_it(name):
    _, (strategy,), _, words = REFUSED_AT_LAST[name]
    assert any(words in text for text in on_world(2, [(_refused_one, strategy, name)])[0])


def test_what_servers_do_not_see_is_refused():
    worker, _ = run_each(partial(train, "parameter-server", called, make=limited), 2)
    assert "parametrization (torch.nn.utils.parametrize)" in str(worker.error)


def _train_one(strategy, name):
    return train(strategy, **SAME[name][0], replay=strategy == "ddp")


def _refused_one(strategy, name):
    of_one, _, kind, _ = (REFUSED | REFUSED_AT_LAST)[name]
    return refused(strategy, of_one, kind)


# ---- what is said ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_that_scales_what_it_looks_up_is_refused_on_one_rank_too(monkeypatch, kind):
    monkeypatch.setenv("TERM", "dumb")
    with Run() as run, pytest.raises(UsageError, match=r"model\.0\.weight\.renorm_\(2, 0, 1\.5\)"):
        run.model(nn.Sequential(kind(3, 2, max_norm=1.5)))


def test_a_model_within_ddp_is_refused_on_one_rank_too(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    wrapped = object.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    with Run() as run:
        model = run.model(net())
        with pytest.raises(UsageError, match="leave DistributedDataParallel out"):
            wrapped.module = model
        wrapped.module = net()  # of no run
        with pytest.raises(UsageError, match="leave DistributedDataParallel out"):
            run.model(wrapped)


def test_errors_of_absent_tensors_say_where_it_is_to_be_computed():
    error = RuntimeError("Cannot copy out of meta tensor; no data!")
    assert "Net.score(...) uses parameters" in partial_models.of_absent_parameters("pipeline", error, "Net.score")
    assert "weight_decay=" in partial_models.of_absent_parameters("pipeline", error, "")
    assert partial_models.of_absent_parameters("pipeline", RuntimeError("another"), "") == ""
