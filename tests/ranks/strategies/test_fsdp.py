"""Models divided among ranks: the bits of one rank, whatever is gathered, summed, clipped, left out or resumed."""

import copy
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.collectives import Group, single_rank_group
from lockstep.errors import MismatchError, SettingError, UsageError
from lockstep.run import Run
from lockstep.strategies import StrategyContext, open_strategy
from lockstep.strategies.replicated.single_process import SingleProcess
from lockstep.strategies.sharded.hybrid_sharded import ranks_of_a_copy
from lockstep.testing import state_hash
from lockstep.world import World
from worlds import error_of, on_world

SGD, PLAIN, ADAMW, FOREACH = "sgd", "sgd without decay", "adamw", "adamw of many at once"

OPTIMIZERS = {
    SGD: lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    PLAIN: lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),  # whose moments show the sign of a gradient of zero
    ADAMW: lambda p: torch.optim.AdamW(p, lr=0.01),
    FOREACH: lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}


class Block(nn.Module):
    """Sizes that no number of ranks divides, statistics, dropout."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.up, self.norm, self.drop, self.down = nn.Linear(7, 10), norm(10), nn.Dropout(0.2), nn.Linear(10, 7)

    def forward(self, x):
        return x + self.down(self.drop(F.relu(self.norm(self.up(x)))))


class Net(nn.Module):
    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([Block(norm), Block(norm)])
        self.last = nn.Linear(7, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Unstated(Net):
    """In which nothing has statistics."""

    def __init__(self):
        super().__init__(nn.LayerNorm)


class Scaled(Net):
    """With parameters that cannot be divided: one of no dimension, and one whose rows do not follow each other."""

    def __init__(self):
        super().__init__()
        self.scale = Scale()

    def forward(self, x):
        return self.scale(super().forward(x))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))
        self.mix = nn.Parameter(torch.eye(3)[:, [1, 0, 2]].t())

    def forward(self, x):
        return x @ self.mix * self.by


def is_block(module):
    return isinstance(module, Block) or getattr(module, "in_features", 0) == 5


class Winding(nn.Module):
    """Shared and frozen parameters; modules that some micro-batches leave out, and one that all do."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([nn.Linear(7, 7) for _ in range(3)])
        self.tied, self.never, self.last = nn.Linear(7, 7), nn.Linear(3, 3), nn.Linear(7, 3)
        self.rare = nn.Parameter(torch.ones(7))
        self.tied.weight = self.blocks[0].weight
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        x = self.tied(self.blocks[0](self.first(x)))
        if x.detach().sum() > 0:
            nowhere = torch.zeros(7, dtype=torch.bool)
            x = torch.where(
                nowhere, -self.rare, self.blocks[1](x)
            )  # its gradient is -0.0: one of nothing must not be 0.0
        else:
            x = self.blocks[2](x)
        return self.last(x)


def samples(length=26):
    """Steps of 20 and 6 samples: of 7 and 2 micro-batches of 3, so that a third rank gets none of the last."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(length, 5, generator=generator), torch.randint(0, 3, (length,), generator=generator)
    )


def whole(value):
    """All of a state, on every rank; under the names of the model that was given."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {str(name).removeprefix("module."): whole(item) for name, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list | tuple) else value


def bits(*objects):
    return state_hash(*(whole(o.state_dict()) for o in objects))


def train(strategy, optimizer=ADAMW, model=Net, unused=False, micro_batch=3, count=False, epochs=1, **told):
    with Run(seed=1, strategy=strategy, **told) as run:
        net = run.model(model(), find_unused_parameters=unused)
        steps = run.optimizer(OPTIMIZERS[optimizer](net.parameters()))
        batches = run.loader(samples(), global_batch=20, micro_batch=micro_batch)
        held_out = run.loader(samples(8), global_batch=20, micro_batch=micro_batch, shuffle=False)
        for _ in run.epochs(epochs):
            for inputs, labels in run.train(batches):
                loss = F.cross_entropy(net(inputs), labels)
                run.step(loss, count=int(labels.sum()) + 1) if count else run.step(loss)
            for inputs, labels in run.evaluate(held_out):
                run.measure(loss=F.cross_entropy(net(inputs), labels))
        return bits(net, steps), run.metrics["loss"]


def resume(strategy, epochs, checkpoint, model=Net):
    """The second epoch, by another strategy than the first one."""
    assert len(list(Path(checkpoint).glob("step-*"))) == epochs - 1
    os.environ["LOCKSTEP_RESUME"] = "1"
    try:
        return train(strategy, model=model, epochs=epochs, checkpoint=checkpoint)[0]
    finally:
        del os.environ["LOCKSTEP_RESUME"]


def adversaries(strategy):
    """Two optimizers that step apart, and a third model that learns nothing."""
    with Run(seed=1, strategy=strategy) as run:
        maker = run.model(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 5)))
        judge = run.model(nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 1)))
        fixed = run.model(nn.Linear(5, 5).requires_grad_(False))
        optimizers = [run.optimizer(torch.optim.AdamW(m.parameters(), lr=0.01)) for m in (maker, judge)]
        for real, _ in run.train(run.loader(samples(), global_batch=20, micro_batch=3)):
            made = maker(torch.randn(len(real), 4))
            loss = F.softplus(-judge(fixed(real))).mean() + F.softplus(judge(made.detach())).mean()
            run.step(loss, optimizer=optimizers[1])
            run.step(F.softplus(-judge(made)).mean(), optimizer=optimizers[0])
        return bits(maker, judge, fixed, *optimizers)


def looking(strategy):
    """Forward passes without gradients before the backward pass, before the update and after it; weights by hand."""
    with Run(seed=1, strategy=strategy) as run:
        net = run.model(Net())
        steps = run.optimizer(OPTIMIZERS[ADAMW](net.parameters()))

        def look(inputs):
            with torch.no_grad():
                return net.eval()(inputs), net.train()

        for inputs, labels in run.train(run.loader(samples(), global_batch=20, micro_batch=3)):
            loss = F.cross_entropy(net(inputs), labels)
            run.backward(loss + look(inputs)[0].mean())
            look(inputs)
            if not run.update():
                continue
            look(inputs)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.clamp_(-0.2, 0.2)
        return bits(net, steps)


def hooked(strategy, register):
    with Run(strategy=strategy) as run:
        net = run.model(Net())
        register(net.last.weight)
        for inputs, labels in run.train(run.loader(samples(), global_batch=20, micro_batch=3)):
            run.step(F.cross_entropy(net(inputs), labels))


def refused_hooks():
    return [
        error_of(UsageError, hooked, "zero:stage=2", lambda parameter: parameter.register_hook(torch.neg)),
        error_of(UsageError, hooked, "fsdp", lambda parameter: parameter.register_post_accumulate_grad_hook(print)),
    ]


def interrupted(strategy):
    """Steps that are given up after the forward pass, and after the first micro-batch."""
    with Run(seed=1, strategy=strategy) as run:
        net = run.model(Net())
        steps = run.optimizer(OPTIMIZERS[ADAMW](net.parameters()))
        batches = run.loader(samples(), global_batch=20, micro_batch=3)
        for epoch in run.epochs(3):
            for inputs, labels in run.train(batches):
                loss = F.cross_entropy(net(inputs), labels)
                if epoch == 0:
                    break
                run.step(loss)
                if epoch == 1:
                    break
        return bits(net, steps)


def compiled(strategy, compiles=True):
    """Each block is compiled, with what gathers it outside: how many graphs there are, and whether it is in one."""
    compilations = []

    def backend(graph, inputs):
        compilations.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    with Run(seed=1, strategy=strategy) as run:
        net = run.model(Unstated())
        if compiles:
            net.compile(backend=backend)
        steps = run.optimizer(OPTIMIZERS[SGD](net.parameters()))
        for inputs, labels in run.train(run.loader(samples(18), global_batch=18, micro_batch=3)):
            run.step(F.cross_entropy(net(inputs), labels))
        return bits(net, steps), len(compilations), any("fsdp" in call for calls in compilations for call in calls)


def from_rank_0(strategy):
    with Run(strategy=strategy) as run:
        torch.manual_seed(run.rank)
        net = Net()
        net.blocks[0].norm.running_mean.fill_(run.rank)
        return bits(run.model(net)), type(net).__mro__[2] is Net


def rows_here(strategy):
    """How many elements of parameters and moments this rank holds, and how many there are."""
    with Run(strategy=strategy) as run:
        net = run.model(Net())
        steps = run.optimizer(OPTIMIZERS[ADAMW](net.parameters()))
        for inputs, labels in run.train(run.loader(samples(), global_batch=20, micro_batch=3)):
            run.step(F.cross_entropy(net(inputs), labels))
        moments = [m for s in steps.state.values() for m in s.values() if m.dim()]
        held = [*net.parameters(), *moments]
        return sum(t.to_local().numel() for t in held), sum(t.numel() for t in held)


class Diverging(nn.Module):
    """Calls another block on each rank: they are of one size, so nothing would tell."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.blocks = rank, nn.ModuleList([nn.Linear(5, 3) for _ in range(3)])

    def forward(self, x):
        return self.blocks[self.rank](x)


def evaluate_diverging(unused):
    with Run(strategy="fsdp") as run:
        net = run.model(Diverging(run.rank), find_unused_parameters=unused)
        for inputs, labels in run.evaluate(run.loader(samples(18), global_batch=18, micro_batch=3, shuffle=False)):
            run.measure(right=net(inputs).argmax(1) == labels)


def ranks_part():
    evaluate_diverging(unused=True)
    return error_of(MismatchError, evaluate_diverging, unused=False)


def refused():
    return [
        error_of(UsageError, train, "fsdp", model=Winding),
        error_of(SettingError, train, "fsdp:wrap=Blok"),
        error_of(UsageError, train, "fsdp:mixed=bf16"),
        error_of(UsageError, with_parameter, nn.Parameter(torch.ones(()))),
        error_of(UsageError, with_parameter, nn.Parameter(torch.ones(3, 2).t())),
        error_of(UsageError, with_parameter, nn.Parameter(torch.ones(0, 2))),
        error_of(UsageError, with_parameter, nn.Parameter(torch.ones(3, dtype=torch.float64))),
        error_of(SettingError, Run, strategy="hsdp:shard=2"),
        error_of(UsageError, with_parameter, nn.Parameter(torch.ones(())), "hsdp:shard=3"),
        error_of(SettingError, train, "fsdp:mixed=fp16", model=Unstated),
        error_of(SettingError, train, "fsdp:ignored_modules=Blok"),
        error_of(SettingError, train, "fsdp:ignored_modules=first", precision="fp16"),
        error_of(UsageError, train, "fsdp:ignored_modules=first", FOREACH),
        error_of(SettingError, train, f"fsdp:wrap={__name__}:is_blok"),
    ]


def with_parameter(parameter, strategy="fsdp"):
    with Run(strategy=strategy) as run:
        net = nn.Linear(2, 2)
        net.more = parameter
        run.model(net)


EVERYWHERE = [
    (train, ("fsdp", SGD), {}),
    (train, ("fsdp", ADAMW), {}),
    (train, ("fsdp", ADAMW), {"precision": "bf16", "clip_norm": 0.05, "count": True}),
    (train, ("fsdp", PLAIN, Winding), {"unused": True}),
    (adversaries, ("fsdp",), {}),
    (interrupted, ("fsdp",), {}),
    (looking, ("fsdp",), {}),
]
ON_THREE = [
    (train, ("fsdp", FOREACH), {}),
    (train, ("fsdp", ADAMW), {"precision": "fp16"}),
    (train, ("fsdp:wrap=whole", ADAMW), {}),
    (train, ("fsdp:wrap=80,reshard=false", ADAMW), {}),
    (train, ("fsdp:wrap=Block+Linear,checkpoint_activations", ADAMW), {}),
    (train, ("fsdp:reshard=step", ADAMW), {"clip_norm": 0.05}),
    (train, ("zero:stage=2", ADAMW, Winding), {"unused": True}),
    (train, (f"fsdp:prefetch=2,wrap={__name__}:is_block", ADAMW), {}),
    (train, ("fsdp:ignored_modules=Scale+blocks.0", ADAMW, Scaled), {"clip_norm": 0.05, "count": True}),
    (train, ("fsdp:mixed=fp16", ADAMW, Unstated), {"precision": "fp16"}),
    (train, ("fsdp:mixed=bf16", ADAMW, Unstated), {}),
    (train, ("fsdp:mixed=bf16,checkpoint_activations", SGD, Unstated), {"unused": True}),
]
ON_FOUR = [
    (train, ("hsdp:shard=2", SGD), {"clip_norm": 0.05}),
    (train, ("hsdp", ADAMW), {}),
    (train, ("hsdp:shard=2,wrap=Block", ADAMW), {"precision": "bf16"}),
    (train, ("hsdp:shard=2,ignored_modules=Scale,reshard=step", ADAMW, Scaled), {}),
    (adversaries, ("hsdp:shard=2",), {}),
    (looking, ("hsdp:shard=2,reshard=step",), {}),
]


def on_one_rank(function, args, options):
    """As by the strategy ``none``; mixed precision is the strategy's own, on one rank as on many."""
    return function(args[0] if "mixed" in args[0] else "none", *args[1:], **options)


def called(function, args, options):
    return function(*args, **options)


def differing(cases, results):
    """The cases in which some rank got other bits than one rank alone, and what they got."""
    return [
        (args, options, expected, got)
        for (function, args, options), got in zip(cases, results, strict=True)
        for expected in [on_one_rank(function, args, options)]
        if set(got) != {expected}
    ]


def test_on_two_ranks():
    *results, messages = on_world(2, [*((called, *case) for case in EVERYWHERE), (refused_hooks,)])
    assert differing(EVERYWHERE, results) == []
    for of_one in messages:
        assert all("a hook for the gradient of a parameter of shape (3, 7)" in told for told in of_one), of_one


@pytest.mark.campaign
def test_on_three_ranks(tmp_path):
    cases = EVERYWHERE + ON_THREE
    moves = {name: str(tmp_path / name) for name in ("from none", "from ddp", "to ddp", "to none")}
    resume("none", 1, moves["from none"])
    others = [
        (resume, "ddp", 1, moves["from ddp"]),
        (resume, "fsdp", 2, moves["from ddp"]),
        (resume, "fsdp", 2, moves["from none"]),
        (resume, "fsdp", 1, moves["to ddp"]),
        (resume, "ddp", 2, moves["to ddp"]),
        (resume, "fsdp", 1, moves["to none"]),
        (from_rank_0, "fsdp"),
        (rows_here, "fsdp"),
        (compiled, "fsdp:wrap=Block"),
        (ranks_part,),
        (fast, "fsdp"),
        (refused,),  # leaves the world behind in which it was refused
    ]
    results = on_world(3, [*((called, *case) for case in cases), *others])
    assert differing(cases, results[: len(cases)]) == []

    *moved, begun, rows, per_block, parted, quick, messages = results[len(cases) :]
    expected = train("none", epochs=2)[0]
    half = train("none")[0]
    assert moved == [[bits] * 3 for bits in (half, expected, expected, half, expected, half)]
    assert resume("none", 2, moves["to none"]) == expected

    assert begun == [(from_rank_0("none")[0], True)] * 3
    held, there = zip(*rows, strict=True)
    assert sum(held) == there[0]
    assert max(held) <= there[0] / 2  # of 40 % at most, as its sizes go

    assert per_block == [(compiled("none", compiles=False)[0], 1, False)] * 3  # both blocks are the same code

    assert all("the order in which forward() calls the blocks" in p and "rank 1: " in p for p in parted)
    says = [
        " of 13 parameters had no part in the loss: ",
        "wrap=Blok: Net has no module of class 'Blok'; it has BatchNorm1d, Block, Dropout, Linear. Name",
        "mixed=bf16 with blocks.0.norm, a BatchNorm1d: its statistics are fp32",
        "the parameter more has no dimension, and fsdp divides rows; make it of shape (1,)",
        "the parameter more of shape (2, 3) has strides (1, 2)",
        "the parameter more of shape (0, 2) has no elements, and torch's fully_shard divides no gradient of none",
        "Linear is gathered as one, and its parameters have several types: weight torch.float32, more torch.float64",
        "strategy='hsdp' with 2 of 3 ranks to a copy; shard=N takes a divisor of the number of ranks",
        "the parameter more has no dimension, and hsdp divides rows",
        "mixed=fp16: its gradients need the loss scale of precision='fp16'",
        "ignored_modules=Blok: Net has no module with parameters of class or name 'Blok'; it has first, blocks, last",
        "fsdp with ignored_modules with precision='fp16': torch unscales divided and whole gradients apart",
        "AdamW with foreach or fused steps parameters that are divided and those of ignored_modules=first at once",
        f"wrap={__name__}:is_blok: module '{__name__}' has no attribute 'is_blok'; give MODULE:FUNCTION",
    ]
    for of_one in messages:
        assert [text in message for text, message in zip(says, of_one, strict=True)] == [True] * len(says), of_one
    assert len(set(quick)) == 1
    assert quick[0] == pytest.approx(train("none")[1], rel=1e-3)


def fast(strategy):
    return train(strategy, reduction="fast")[1]


@pytest.mark.campaign
def test_copies_on_four_ranks(tmp_path):
    where = str(tmp_path)
    results = on_world(
        4, [*((called, *case) for case in ON_FOUR), (resume, "hsdp:shard=2", 1, where), (fast, "hsdp:shard=2")]
    )
    assert differing(ON_FOUR, results[: len(ON_FOUR)]) == []
    assert results[-2] == [train("none")[0]] * 4
    assert resume("none", 2, where) == train("none", epochs=2)[0]
    assert results[-1] == [pytest.approx(train("none")[1], rel=1e-3)] * 4


def opened(spec, say=lambda text: None):
    return open_strategy(spec, StrategyContext(single_rank_group(), lambda rank, of: range(of), say=say))


@pytest.mark.parametrize("spec", ["fsdp", "hsdp", "hsdp:shard=8,wrap=Block", "zero:stage=2"])
def test_one_rank_divides_nothing(spec):
    assert isinstance(opened(spec), SingleProcess)


def test_one_rank_compiles_the_same_blocks():
    net = opened("fsdp:wrap=Block").setup_model(Net(), find_unused_parameters=False)
    copy.deepcopy(net).compile(backend="eager")
    assert not [module for module in net.modules() if module._compiled_call_impl]
    net.compile(backend="eager")
    assert [module for module in net.modules() if module._compiled_call_impl] == list(net.blocks)


def test_one_rank_recomputes_activations():
    assert train("fsdp:checkpoint_activations") == train("none")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("fsdp:mixed=fp8", "mixed='fp8': give one of none, bf16, fp16"),
        ("fsdp:reshard=never", "reshard='never': give one of true, false, step"),
        ("fsdp:prefetch=-1", "prefetch=-1: give the number of blocks"),
        ("fsdp:mixed=bf16,ignored_modules=Block", "they would stay fp32 between modules in bf16"),
        ("zero:stage=3", "stage=3: give 1 or 2; the third stage of ZeRO is the strategy fsdp"),
    ],
)
def test_an_option_that_cannot_be_is_refused(spec, says):
    with pytest.raises(SettingError, match=says):
        opened(spec)


@pytest.mark.parametrize(
    ("nodes", "shard", "ranks"),
    [([0, 0, 1, 1], 0, 2), ([0] * 6, 0, 6), ([0] * 6, 3, 3), ([0, 1], 2, 2)],
)
def test_ranks_of_a_copy(nodes, shard, ranks):
    assert ranks_of_a_copy(group_on(nodes), shard) == ranks


@pytest.mark.parametrize(
    ("nodes", "shard", "says"),
    [
        ([0, 0, 1], 0, "nodes have 2, 1 ranks; start equally many on each"),
        ([0, 1, 0, 1], 0, "in a row, or say hsdp:shard=N"),
        ([0, 1], 0, "with 1 of 2 ranks to a copy"),
        ([0] * 4, 3, "with 3 of 4 ranks to a copy; shard=N takes a divisor"),
    ],
)
def test_ranks_that_cannot_be_divided_are_refused(nodes, shard, says):
    with pytest.raises(SettingError, match=says):
        ranks_of_a_copy(group_on(nodes), shard)


def group_on(nodes):
    return Group(World(0, len(nodes), 0, 1, 0, 1), torch.device("cpu"), HashStore(), None, 0.0, nodes=nodes)


def test_no_blocks_to_recompute_is_told():
    said = []
    opened("fsdp:checkpoint_activations,wrap=whole", said.append).setup_model(Net(), find_unused_parameters=False)
    assert said == [
        "checkpoint_activations: Net has no blocks by wrap=whole, so all of its activations are kept; name the classes "
        "of its blocks in wrap=..."
    ]


class Translator(nn.Module):
    """Calls its encoder by itself before it generates, as T5 of transformers does."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, tokens, encoded=None):
        return self.head(self.encoder(tokens) if encoded is None else encoded)

    @torch.no_grad()
    def generate(self, tokens):
        encoded = self.encoder(tokens)
        return (self(None, encoded) + self(tokens)).argmax(-1).tolist()

    def score(self, tokens):
        return self.encoder(tokens).sum()


def generates(strategy):
    found = []
    with Run(strategy=strategy) as run:
        model = run.model(Translator())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        tokens = torch.arange(48) * 5 % 8
        for _ in run.epochs(2):
            for batch in run.train(run.loader(tokens, global_batch=8, micro_batch=2, workers=0)):
                run.step(F.cross_entropy(model(batch), (batch + 1) % 8))
            found.append(model.generate(tokens[:8]))
    return found


def uses_an_encoder_elsewhere():
    with Run(strategy="fsdp:wrap=whole") as run:
        run.model(Translator()).score(torch.arange(4))


def test_generate_may_call_parts_of_the_model():
    found = on_world(
        2, [(generates, "fsdp:wrap=whole"), (generates, "fsdp:wrap=Embedding"), (uses_an_encoder_elsewhere,)]
    )
    expected = generates("none")
    assert found[:2] == [[expected] * 2] * 2
    assert all("Translator.score(...) uses parameters" in said for said in found[2])
