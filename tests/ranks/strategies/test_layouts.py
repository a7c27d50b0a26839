"""Gradients of parameters in every layout and of every type are those of plain torch, and the same on any world."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.errors import UsageError
from lockstep.launch_contract import RESUME
from lockstep.run import Run
from lockstep.testing import run_ranks, state_hash
from worlds import WITHOUT_REPLAYS, error_of, on_world

pytestmark = pytest.mark.together  # what they compute once is computed on one worker

# 6 micro-batches in a step: the second of 3 ranks holds two parts of the tree. The last step holds 2 + 1 samples, so
# that of 4 ranks two have no micro-batch.
SIZES = {"global_batch": 12, "micro_batch": 2}
SAMPLES, BATCH = 27, 12


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=dtype)


def words(*shape, of=20):
    return torch.randint(0, of, shape, generator=torch.Generator().manual_seed(5))


class Convolution(nn.Module):
    """Of more than one input channel: with one, the two layouts are the same memory."""

    def __init__(self, dimensions, memory_format):
        super().__init__()
        kind = {2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
        self.first, self.second = kind(3, 4, 2), kind(4, 2, 2)
        self.to(memory_format=memory_format)
        self.memory_format = memory_format

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.to(memory_format=self.memory_format)))).square().flatten(1).sum(1)


class Of(nn.Module):
    """Parameters as they are given, and the loss of each sample."""

    def __init__(self, parameters, losses):
        super().__init__()
        self.of = nn.ParameterList(parameters)
        self.losses = losses

    def forward(self, x):
        return self.losses(x, *self.of)


def transposed():
    weight, other = nn.Parameter(random(5, 3).t()), nn.Parameter(random(2, 3, 4).permute(2, 0, 1))
    assert not weight.is_contiguous()
    return Of([weight, other], lambda x, w, v: (x @ w).square().sum(1) + (x[:, :2] @ v.sum(0)[:, :2]).tanh().sum(1))


def sliced():
    columns, steps = random(3, 8)[:, 1:6], random(10)[::2]
    assert not columns.is_contiguous()
    assert steps.stride() == (2,)
    return Of([nn.Parameter(columns), nn.Parameter(steps)], lambda x, w, v: (x @ w * v).square().sum(1))


def no_dimension():
    return Of([nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(1))], lambda x, a, b: (x * a).exp().sum(1) * b)


def empty():
    parameters = [nn.Parameter(torch.zeros(0, 3)), nn.Parameter(random(3)), nn.Parameter(torch.zeros(4, 0))]
    return Of(parameters, lambda x, none, w, nil: (x @ w).square() + none.sum() + nil.sum())


def of_type(dtype):
    parameters = [nn.Parameter(random(3, 4, dtype=dtype)), nn.Parameter(random(4, dtype=dtype))]
    return Of(parameters, lambda x, w, b: (x.to(dtype) @ w + b).abs().square().sum(1).float())


def mixed():
    parameters = [nn.Parameter(random(3, 3, dtype=t)) for t in (torch.float32, torch.float64, torch.complex64)]
    conjugate = nn.Parameter(random(3, 4, dtype=torch.complex128).t())

    def losses(x, single, double, complexes, others):
        narrow = (x @ single).double() @ double
        return (narrow.to(torch.complex128) @ complexes.to(torch.complex128) @ others.t().conj()).abs().sum(1)

    return Of([*parameters, conjugate], losses)


def tiny():
    return Of([nn.Parameter(random(1) * n) for n in range(300)], lambda x, *all: x.sum(1) * torch.cat(all).sin().sum())


class Table(nn.Module):
    """Each word has a row; a linear layer is beside it, so that dense and sparse gradients come together."""

    def __init__(self, bag=False, dense=True):
        super().__init__()
        # Words are read from a third of the table, so most rows are never touched.
        self.rows = nn.EmbeddingBag(60, 3, sparse=True, mode="sum") if bag else nn.Embedding(60, 3, sparse=True)
        self.out = nn.Linear(3, 2) if dense else nn.Identity()

    def forward(self, x):
        found = self.rows(x) if isinstance(self.rows, nn.EmbeddingBag) else self.rows(x).tanh().sum(1)
        return self.out(found).square().sum(1)


def rare(x):
    """How many items each sample holds, of which the mean is: of some micro-batches, none."""
    return (x < 5).sum(1)


@dataclass(frozen=True)
class Case:
    """What is trained: the loss is the mean of what the model returns, of samples or of items."""

    model: Callable[[], nn.Module]
    data: torch.Tensor
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = lambda net: [sgd(net.parameters())]
    items: Callable[[torch.Tensor], torch.Tensor] | None = None
    settings: dict = field(default_factory=dict)
    same_bits: bool = True
    near: float = 1e-5


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, lr=0.05, **options)


def momentum(net):
    return [sgd(net.parameters(), momentum=0.9)]


def adam(net):
    return [torch.optim.Adam(net.parameters(), lr=0.01)]


def sparse_adam(net):
    return [
        torch.optim.SparseAdam([net.rows.weight], lr=0.05),
        *([sgd(net.out.parameters())] if [*net.out.parameters()] else []),
    ]


def plain(net):
    return [sgd(net.parameters())]


IMAGES, VIDEOS, ROWS, WORDS = (
    random(SAMPLES, 3, 4, 4),
    random(SAMPLES, 3, 3, 3, 3),
    random(SAMPLES, 3),
    words(SAMPLES, 4),
)
WORDS[0] = 59  # a row of one rank's only micro-batch
CASES = {
    "channels_last": Case(lambda: Convolution(2, torch.channels_last), IMAGES, momentum),
    "channels_last_3d": Case(lambda: Convolution(3, torch.channels_last_3d), VIDEOS, momentum),
    "channels_last, fast": Case(
        lambda: Convolution(2, torch.channels_last), IMAGES, settings={"reduction": "fast"}, same_bits=False
    ),
    "channels_last in small buckets": Case(
        lambda: Convolution(2, torch.channels_last), IMAGES, momentum, settings={"bucket_mb": 0.0001}
    ),
    "transposed": Case(transposed, ROWS, adam),
    "transposed, clipped": Case(transposed, ROWS, settings={"clip_norm": 0.5}),
    "sliced": Case(sliced, ROWS, momentum),
    "no dimension": Case(no_dimension, ROWS, adam),
    "empty": Case(empty, ROWS, momentum, settings={"clip_norm": 0.5}),
    "float64": Case(lambda: of_type(torch.float64), ROWS.double(), momentum, settings={"clip_norm": 0.5}, near=1e-12),
    "bf16": Case(lambda: of_type(torch.bfloat16), ROWS, near=0.05),
    "complex64": Case(lambda: of_type(torch.complex64), ROWS, momentum),
    "complex64, clipped": Case(lambda: of_type(torch.complex64), ROWS, settings={"clip_norm": 0.5}),
    "complex64, fast": Case(lambda: of_type(torch.complex64), ROWS, settings={"reduction": "fast"}, same_bits=False),
    "mixed": Case(mixed, ROWS, adam, settings={"clip_norm": 0.5}),
    "300 tiny": Case(tiny, ROWS, momentum),
    "sparse": Case(Table, WORDS, plain),
    "sparse, nothing beside": Case(lambda: Table(dense=False), WORDS, sparse_adam),
    "sparse Adam": Case(Table, WORDS, sparse_adam),
    "sparse Adam, clipped": Case(Table, WORDS, sparse_adam, settings={"clip_norm": 0.1}),
    "sparse, counted": Case(Table, WORDS, plain, items=rare),
    "sparse Adam, counted and clipped": Case(Table, WORDS, sparse_adam, items=rare, settings={"clip_norm": 0.1}),
    "sparse, fast": Case(Table, WORDS, plain, settings={"reduction": "fast"}, same_bits=False),
    "sparse Adam, counted, fast": Case(
        Table, WORDS, sparse_adam, items=rare, settings={"reduction": "fast"}, same_bits=False
    ),
    "sparse bag": Case(lambda: Table(bag=True), WORDS, plain),
    "sparse bag, Adam": Case(lambda: Table(bag=True), WORDS, sparse_adam, settings={"clip_norm": 0.1}),
}


def loss_of(case, model, x):
    """The loss of ``x``, and of how many items it is the mean; None: of the samples."""
    losses = model(x)
    if case.items is None:
        return losses.mean(), None
    items = case.items(x)
    return (losses * items).sum() / items.sum().clamp(min=1), int(items.sum())


def dense(gradient):
    return gradient.detach().to_dense().clone()


def trained(name, strategy):
    """The gradients of each step, as they were summed; the parameters and a hash of everything in the end."""
    case = CASES[name]
    with Run(seed=3, strategy=strategy, **case.settings) as run:
        torch.manual_seed(7)
        model = run.model(case.model())
        optimizers = [run.optimizer(optimizer) for optimizer in case.optimizers(model)]
        gradients = []
        for (x,) in run.train(run.loader((case.data,), shuffle=False, **SIZES)):
            loss, items = loss_of(case, model, x)
            if run.backward(loss, count=items, optimizer=optimizers):
                gradients.append([dense(p.grad) for p in model.parameters()])
            run.update(optimizers)
        state = (
            state_hash([run._context.strategy.state_layout.optimizer_state(o) for o in optimizers])
            if strategy != "zero"
            else ""
        )
        return gradients, [p.detach().clone() for p in model.parameters()], state_hash(model) + state


@functools.cache
def by_hand(name):
    """The same with nothing but torch."""
    case = CASES[name]
    torch.manual_seed(7)
    model = case.model()
    optimizers = case.optimizers(model)
    gradients = []
    for x in case.data.split(BATCH):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(case, model, x)[0].backward()
        gradients.append([dense(p.grad) for p in model.parameters()])
        if "clip_norm" in case.settings:
            norm = torch.cat([torch.view_as_real(g.to(torch.complex128)).reshape(-1) for g in gradients[-1]]).norm()
            for p in model.parameters():
                p.grad = p.grad * min(1.0, case.settings["clip_norm"] / (norm.item() + 1e-6))
        for optimizer in optimizers:
            optimizer.step()
    return gradients, [p.detach() for p in model.parameters()]


@functools.cache
def alone(name):
    return trained(name, "none")


@pytest.mark.parametrize("name", CASES)
def test_gradients_on_one_rank_are_those_of_plain_torch(name):
    check(name, alone(name))


def check(name, found):
    near = {"rtol": CASES[name].near, "atol": CASES[name].near}
    (gradients, parameters, _), (right, end) = found, by_hand(name)
    assert len(gradients) == len(right) == 3
    for step, (mine, theirs) in enumerate(zip(gradients, right, strict=True)):
        for place, (here, there) in enumerate(zip(mine, theirs, strict=True)):
            assert here.dtype == there.dtype
            assert torch.allclose(here, there, **near), f"{name}, step {step}, place {place}: {here}, by hand {there}"
    torch.testing.assert_close(parameters, end, **near)
    assert state_hash(parameters) != state_hash(list(CASES[name].model().parameters())), "nothing was learned"


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.campaign)])
def test_gradients_are_those_of_plain_torch_and_of_one_rank(world):
    cases = [(name, "ddp") for name in CASES]
    cases += [(name, "zero") for name in CASES if CASES[name].same_bits and world == 3]
    trainings = on_world(world, [(trained, *case) for case in cases], env=WITHOUT_REPLAYS if world == 2 else None)
    for (name, strategy), ranks in zip(cases, trainings, strict=True):
        for rank, found in enumerate(ranks):
            where = f"{name} under {strategy}, rank {rank} of {world}"
            assert isinstance(found, tuple), f"{where}: {found}"
            check(name, found)
            if CASES[name].same_bits:
                here = alone(name)
                assert state_hash(found[:2]) == state_hash(here[:2]), where
                assert here[2].startswith(found[2]), where
            else:
                assert state_hash(found) == state_hash(ranks[0]), f"{where}: not as rank 0"


# ---- what is refused -------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.out = nn.Embedding(6, 3, sparse=True), nn.Linear(3, 6, bias=False)
        self.out.weight = self.rows.weight


class Home(nn.Module):
    """Asks for sparse gradients of a table that is no embedding's."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(random(20, 3))

    def forward(self, x):
        return F.embedding(x, self.table, sparse=True).sum((1, 2))


def refused_model(strategy, kind):
    make = {
        "sparse": lambda: nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 2)),
        "sparse beside a served one": lambda: nn.ModuleDict(
            {"served": nn.Embedding(20, 4), "own": nn.Embedding(20, 4, sparse=True)}
        ),
        "tied": Tied,
        "expanded": lambda: Of([nn.Parameter(torch.ones(3, 1).expand(3, 4))], None),
        "conjugated": lambda: Of([nn.Parameter(random(3, dtype=torch.complex64).conj())], None),
    }
    with Run(strategy=strategy) as run:
        return error_of(UsageError, run.model, make[kind]())


def refused_loss(strategy):
    with Run(strategy=strategy) as run:
        model = run.model(Home())
        run.optimizer(sgd(model.parameters()))
        (x,) = next(batches := run.train(run.loader((WORDS[:16],), global_batch=16, micro_batch=2)))
        message = error_of(UsageError, run.step, model(x).mean())
        batches.close()
        return message


NEEDS_DENSE = "0.weight has sparse=True, and strategy {} moves dense gradients; leave sparse=True out, or use ddp"
REFUSED = {
    ("fsdp", "sparse"): NEEDS_DENSE.format("fsdp"),
    ("hsdp:shard=2", "sparse"): NEEDS_DENSE.format("hsdp"),
    ("pipeline", "sparse"): NEEDS_DENSE.format("pipeline"),
    ("parameter-server", "sparse"): NEEDS_DENSE.format("parameter-server"),
    ("hybrid:served=served", "sparse beside a served one"): "own.weight has sparse=True and is not served, and workers",
    ("ddp", "tied"): "rows.weight has sparse=True and is out.weight, too, where its gradient is dense; leave sparse",
    ("zero", "expanded"): "of.0 of shape (3, 4) has strides (1, 0): several of its elements are one place in",
    ("ddp", "conjugated"): "of.0 of Of is a conjugated view of what lies in memory",
}


def test_what_cannot_be_summed_is_refused_by_name():
    calls = [*((refused_model, *case) for case in REFUSED), (refused_loss, "ddp")]
    *models, losses = on_world(2, calls)
    for (strategy, kind), says, ranks in zip(REFUSED, REFUSED.values(), models, strict=True):
        for message in ranks:
            assert message.startswith(says), (strategy, kind, message)
    for message in losses:
        assert message.startswith("the gradient of a parameter of shape (20, 3) is sparse, and it belongs to no nn.Emb")


def fused_in(strategy, directory=None, epochs=2, moved_late=False):
    """The model that a fused AdamW trains, whose convolutions have their channels last, perhaps since `run.model`."""
    saves = {} if directory is None else {"checkpoint": directory, "save_every": "1 epoch"}
    with Run(seed=0, strategy=strategy, track="none", **saves) as run:
        staged = strategy.startswith("pipeline")
        layers = [nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 7, 3), nn.ReLU(), nn.Flatten(), nn.Linear(7 * 16, 4)]
        layout = torch.contiguous_format if moved_late else torch.channels_last
        modules = [layer.to(memory_format=layout) for layer in layers]
        model = run.model(modules if staged else nn.Sequential(*modules))
        if moved_late:
            model.to(memory_format=torch.channels_last)
        run.optimizer(torch.optim.AdamW(model.parameters(), 1e-2, fused=True))
        batches = run.loader((random(32, 3, 8, 8), words(32, of=4)), global_batch=8, micro_batch=2)
        loss = nn.CrossEntropyLoss()
        for _ in run.epochs(epochs):
            for x, y in run.train(batches):
                if staged:
                    run.step(loss, x, y)
                else:
                    run.step(F.cross_entropy(model(x), y))
        state = run.state_dict(model)
        return state_hash([*state.values()]) if run.leads else None


def test_a_fused_optimizer_has_the_bits_of_one_rank_where_channels_are_last(tmp_path):
    """Its kernel reads gradients and moments as they lie in memory, and rounds differently where these differ."""
    (alone,), _ = on_world(1, [(fused_in, "none"), (fused_in, "none", str(tmp_path / "r"), 1)])
    ((again,),) = on_world(1, [(fused_in, "none", str(tmp_path / "r"))], env={RESUME: "1"})
    assert again == alone, "after a resume"
    assert len(alone) == 64
    served = ["ddp", "zero", "parameter-server:servers=1", "hybrid:servers=1"]
    for strategy, found in zip(served, on_world(3, [(fused_in, one) for one in served]), strict=True):
        assert found[0] == alone, strategy
    ((piped, *_),) = on_world(4, [(fused_in, "pipeline:stages=2")])
    assert piped == alone


def ignored():
    """The strides of a convolution's parameters, and of their gradients as the optimizer takes them, under fsdp."""
    seen = []
    with Run(seed=0, strategy="fsdp:ignored_modules=0", track="none") as run:
        net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5 * 36, 4)).to(
            memory_format=torch.channels_last
        )
        model = run.model(net)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), 1e-2))
        optimizer.register_step_pre_hook(
            lambda *_: seen.extend((p.stride(), p.grad.stride()) for p in net[0].parameters())
        )
        for x, y in run.train(run.loader((random(32, 3, 8, 8), words(32, of=4)), global_batch=8, micro_batch=2)):
            run.step(F.cross_entropy(model(x), y))
    return seen


def test_gradients_of_modules_that_fsdp_leaves_whole_lie_as_their_parameters():
    """Kernels for lists of tensors, and fused ones, round differently where they do not."""
    for seen in run_ranks(ignored, 2):
        assert seen[0] == ((27, 1, 9, 3), (27, 1, 9, 3))
        assert all(of_parameter == of_gradient for of_parameter, of_gradient in seen)


def test_a_layout_that_is_changed_after_the_model_was_given_is_that_of_the_first_gradients_too():
    late = {"epochs": 1, "moved_late": True}
    ((alone,),) = on_world(1, [(functools.partial(fused_in, **late), "none")])
    replicated = ("ddp", "zero")
    found = on_world(2, [(functools.partial(fused_in, **late), strategy) for strategy in replicated])
    for strategy, (found_in, _) in zip(replicated, found, strict=True):
        assert found_in == alone, strategy
