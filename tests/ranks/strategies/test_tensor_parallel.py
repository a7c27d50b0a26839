"""Layers that several ranks compute together: the results of one rank, and the same bits on any number of groups."""

import copy
import os
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lockstep.collectives import StoredTensor, TensorShard
from lockstep.errors import SettingError, UsageError
from lockstep.launch_contract import RESUME
from lockstep.run import Run
from lockstep.strategies.tensor_parallel.divided_output import DividedOutput
from lockstep.strategies.tensor_parallel.tensor_parallel import check_groups
from lockstep.strategies.tensor_parallel.tensor_plan import TensorDivision, divisions_of, styles_of
from lockstep.testing import run_ranks, state_hash
from worlds import WITHOUT_REPLAYS, on_world

WORDS, LENGTH, WIDTH, HEADS = 24, 6, 16, 4


class Attention(nn.Module):
    """With a norm of each head, a module within another one, which ranks have whole and use for their own heads."""

    def __init__(self, drop):
        super().__init__()
        self.head, self.drop = WIDTH // HEADS, drop
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.Sequential(nn.LayerNorm(self.head))

    def forward(self, x):
        q, k, v = (m(x).view(*x.shape[:2], -1, self.head).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(
            self.norm(q), k, v, is_causal=True, dropout_p=self.drop if self.training else 0.0
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, drop, recomputes):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.attention = Attention(drop)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH), nn.Dropout(drop)
        self.recomputes = recomputes

    def forward(self, x):
        x = x + self.drop(self.attention(self.norms[0](x)))
        wide = self.up(self.norms[1](x))
        # What is checkpointed begins with divided activations, and ends with whole ones.
        rest = checkpoint(self.rest, wide, use_reentrant=False) if self.recomputes else self.rest(wide)
        return x + rest

    def rest(self, wide):
        return self.drop(self.down(self.drop(F.gelu(wide))))


class Gpt(nn.Module):
    """Its head shares its weight with the embedding of words."""

    def __init__(self, drop=0.0, recomputes=False, spare=False):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH, padding_idx=13), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(drop, recomputes) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        if spare:
            self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


PLAN = {
    "words": "embedding_rowwise",
    "places": "embedding_colwise",
    "blocks.*.attention.[qkv]": ColwiseParallel(),
    "blocks.*.attention.norm": "replicated_with_grad_allreduce",
    "blocks.*.attention.out": RowwiseParallel(),
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def loss_of(outputs, words):
    return F.cross_entropy(outputs.flatten(0, 1), words.flatten())


def train(strategy, options="", plan=PLAN, *, as_function=False, unused=False, model=Gpt, told=(), **sizes):
    """The hash and the tensors of the trained model, on the leader; the loss, which all ranks know."""
    words = torch.randint(0, WORDS, (26, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    with Run(seed=1, strategy=strategy + options, **dict(told)) as run:
        net = run.model(
            (lambda: model(**sizes)) if as_function else model(**sizes),
            tensor_plan=plan,
            find_unused_parameters=unused,
        )
        run.optimizer(torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01))
        batches = run.loader(TensorDataset(words[:, :-1], words[:, 1:]), global_batch=20, micro_batch=4)
        for _ in run.epochs(1):
            for inputs, targets in run.train(batches):
                run.step(loss_of, inputs, targets)
            for inputs, targets in run.evaluate(batches):
                run.measure(held_out=loss_of(net(inputs), targets))
        whole = run.state_dict(net)
        return (state_hash(whole), whole, run.metrics["loss"], run.metrics["held_out"]) if run.leads else None


#: What is trained; what is clipped has the norm of the whole gradient, and one layer is never used.
CASES = {
    "plain": {"spare": True, "unused": True, "told": (("clip_norm", 0.5),)},
    "in bf16": {"told": (("precision", "bf16"),)},
    "with dropout": {"drop": 0.3, "recomputes": True},
}
#: The same cases, otherwise made and computed, which must not change a bit.
ALIKE = {
    "plain": {**CASES["plain"], "as_function": True},
    "in bf16": {**CASES["in bf16"], "strategy": "hsdp:shard=2,tensor=2"},
    "with dropout": {"drop": 0.3, "options": ",wrap=Block,checkpoint_activations"},
}


def train_case(strategy, case):
    return train(**{"strategy": strategy, **case})


def on_leader(ranks, strategy, cases):
    env = WITHOUT_REPLAYS if ranks > 2 else None
    found = on_world(ranks, [(train_case, strategy, case) for case in cases.values()], env=env)
    return dict(zip(cases, (of_ranks[0] for of_ranks in found), strict=True))


def test_it_trains_what_one_rank_trains_with_bits_that_do_not_depend_on_the_number_of_groups():
    alone = on_leader(1, "none", CASES)
    two = on_leader(2, "fsdp:tensor=2", {**CASES, "nothing computed again": {"drop": 0.3}})
    four = on_leader(4, "fsdp:tensor=2", ALIKE)
    for name in CASES:
        assert two[name][0] == four[name][0], f"{name}: other bits on two groups"
        assert two[name][2:] == four[name][2:], f"{name}: other metrics on two groups"
        assert two[name][1].keys() == alone[name][1].keys()
        # Between colwise and rowwise layers other elements are dropped.
        tolerance = {"plain": 2e-5, "in bf16": 3e-2, "with dropout": 10}[name]
        away = max(float((value - two[name][1][key]).abs().max()) for key, value in alone[name][1].items())
        assert away <= tolerance, f"{name}: {away:.3g} away"
        assert two[name][2:] == pytest.approx(alone[name][2:], rel=min(0.1, 10 * tolerance)), name
    assert two["nothing computed again"][0] == two["with dropout"][0]


@pytest.mark.campaign
def test_copies_of_what_tensor_groups_hold():
    case = {"plain": CASES["plain"]}
    assert on_leader(8, "hsdp:shard=2,tensor=2", case)["plain"][0] == on_leader(2, "fsdp:tensor=2", case)["plain"][0]


class Dropped(nn.Module):
    """Gives what is dropped where activations are divided, and where they are whole."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 64), nn.Linear(64, 4), nn.Dropout(0.5)
        self.masks = []

    def forward(self, x):
        before = torch.rand(4)
        h = self.up(x)
        inside = self.drop(torch.ones(32))
        out = self.down(h * inside)
        self.masks.append((before, inside, torch.rand(4)))
        return out


def masks():
    with Run(seed=2, strategy="fsdp:tensor=2", replay=False) as run:
        net = run.model(Dropped(), tensor_plan={"up": "colwise", "down": "rowwise"})
        run.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in run.epochs(1):
            for x in run.train(run.loader(torch.ones(6, 4), global_batch=6, micro_batch=2)):
                run.step(net(x).sum())
        held = sum(p.numel() for p in net.parameters())
        return run.gather(net.masks), held, net.state_dict()["up.weight"].shape


def test_ranks_of_a_group_drop_other_elements_only_where_activations_are_divided():
    (of_ranks, held, shape), _ = run_ranks(masks, 2)
    for first, second in zip(*of_ranks, strict=True):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[2], second[2])
        assert not torch.equal(first[1], second[1])
        assert not torch.equal(first[0], first[2])
    assert len(of_ranks[0]) == 3
    assert not torch.equal(of_ranks[0][0][1], of_ranks[0][1][1])
    assert held == (4 * 64 + 64 + 64 * 4) // 2 + 4
    assert tuple(shape) == (32, 4)


def refused(plan, **case):
    try:
        train("fsdp:tensor=2", plan=plan, **case)
    except Exception as error:  # noqa: BLE001 - the test that called will read it
        return f"{type(error).__name__}: {error}"
    return "nothing"


def steps_muon():
    with Run(strategy="fsdp:tensor=2") as run:
        net = run.model(nn.Sequential(nn.Linear(4, 4, bias=False)), tensor_plan={"0": "colwise_gather_output"})
        try:
            run.optimizer(torch.optim.Muon(net.parameters()))
        except UsageError as error:
            return str(error)


def test_a_plan_that_would_train_something_else_is_found():
    without_sums = {name: style for name, style in PLAN.items() if "norm" not in name}
    found = on_world(
        4,
        [
            (refused, without_sums),
            (refused, {"blocks.*.up": "colwise"}),
            (refused, None),
            (steps_muon,),
        ],
    )
    assert "MismatchError: ranks of a tensor group" in found[0][0]
    assert "blocks.0.attention.norm.0.weight" in found[0][0]
    assert "cannot be multiplied" in found[1][0]
    assert "UsageError" in found[2][0]
    assert "tensor_plan={" in found[2][0]
    assert "blocks.0.attention.q" in found[2][0]
    assert "Muon" in found[3][0]


@pytest.mark.parametrize(
    "use",
    [
        lambda q: q.view(2, 3, 4, -1),
        lambda q: q.reshape((6, 4, -1)),
        lambda q: torch.reshape(q, (2, 3, 4, -1)),
        lambda q: q.unflatten(-1, (4, -1)),
        lambda q: q.chunk(3, dim=-1),
        lambda q: torch.split(q, 2, 2),
        F.glu,
        lambda q: q.view(2, -1, 4, 4),
        lambda q: q.view(2, 3, 2, -1, 2),
        lambda q: q.softmax(-1),
        lambda q: F.normalize(q, dim=2),
        lambda q: q.mean(),
        lambda q: torch.sum(q, (1, 2)),
    ],
)
def test_a_part_of_the_last_dimension_is_not_taken_for_the_whole(use):
    q = DividedOutput.of(torch.zeros(2, 3, 8), "blocks.0.q")
    with pytest.raises(UsageError, match=r"blocks\.0\.q"):
        use(q)


@pytest.mark.parametrize(
    "use",
    [
        lambda q: q.view(2, 3, -1, 4),
        lambda q: q.view(2, 3, 2, 4),
        lambda q: q.reshape(6, -1),
        lambda q: q.reshape(-1),
        lambda q: q.view(torch.int32).float(),
        lambda q: q.unflatten(2, (-1, 4)),
        lambda q: q.unflatten(0, (1, -1)),
        lambda q: q.chunk(2)[1],
        lambda q: q.split(1, dim=1)[0],
        lambda q: q + 1,
        lambda q: q.view(-1, 4),
        lambda q: q.view(-1, 3, 8),
        lambda q: q.view(2, -1, 2, 4),
        lambda q: q.softmax(1),
        lambda q: q.sum((0, 1)),
        lambda q: q.max(-q),
    ],
)
def test_what_else_is_computed_with_it_is_computed_with_a_plain_tensor(use):
    plain = torch.randn(2, 3, 8)
    found = use(DividedOutput.of(plain, "blocks.0.q"))
    assert type(found) is torch.Tensor
    assert torch.equal(found, use(plain))


class Small(nn.Module):
    def __init__(self, hidden=8, sparse=False):
        super().__init__()
        self.words = nn.Embedding(6, 4, sparse=sparse)
        self.up, self.down, self.batch_norm = nn.Linear(4, hidden), nn.Linear(hidden, 4), nn.BatchNorm1d(4)

    def forward(self, ids):
        return self.rest(self.words(ids))

    def rest(self, x):
        return self.down(torch.tanh(self.up(self.batch_norm(x))))


SMALL_PLAN = {"words": "embedding_rowwise", "up": "colwise", "down": "rowwise"}


def train_small(
    ids=range(6),
    penalty=0.0,
    directory=None,
    resume=False,
    hidden=8,
    sparse=False,
    again=None,
    averages=False,
    strategy="fsdp:tensor=2",
    **told,
):
    """What goes wrong, in words."""
    os.environ.pop(RESUME, None)
    if resume:
        os.environ[RESUME] = "1"
    saves = {"checkpoint": directory, "save_every": "1 step"} if directory else {}
    try:
        with Run(seed=1, strategy=strategy, **saves, **told) as run:
            net = run.model(Small(hidden, sparse), tensor_plan=SMALL_PLAN)
            if averages:
                run.keep(average=[p.detach().clone() for p in net.parameters()])
            if again:
                nn.init.normal_(net.get_parameter(again))
            run.optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
            for _ in run.epochs(1):
                for each in run.train(run.loader(torch.tensor([*ids]), global_batch=6, micro_batch=3)):
                    norms = sum(p.norm() for p in net.parameters())
                    run.step(net(each).square().mean() + penalty * norms)
        torch.save(net.state_dict(), os.devnull)
    except Exception as error:  # noqa: BLE001 - the test that called will read it
        return f"{type(error).__name__}: {error}"


def differentiates_twice():
    """How far gradients of a gradient's norm are from the whole model's, of how many; shapes of what is whole."""
    with Run(seed=3, strategy="fsdp:tensor=2") as run:
        net, beside = Small(), nn.Linear(3, 5)
        whole = copy.deepcopy(net)
        run.model(net, tensor_plan=SMALL_PLAN)
        run.model(beside, tensor_plan={})
        x = torch.randn(3, 4)
        for model in (whole, net):
            given = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model.rest(given).square().sum(), given, create_graph=True)
            slope.square().sum().backward()
        mine = divisions_of(whole, styles_of(whole, SMALL_PLAN), run.rank, run.world_size)
        known = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
        expected = {name: mine[name].own(grad) if name in mine else grad for name, grad in known.items()}
        away = max(float((p.grad - expected[n]).abs().max()) for n, p in net.named_parameters() if n in known)
        net.load_state_dict(copy.deepcopy(net.state_dict()))
        other = Small().state_dict()
        net.load_state_dict(other)
        loaded = {name: mine[name].own(value) if name in mine else value for name, value in other.items()}
        odd = [name for name, value in net.state_dict(keep_vars=True).items() if not torch.equal(value, loaded[name])]
        return away, len(known), [tuple(p.shape) for p in beside.parameters()], odd


def test_what_is_no_layer_s_part_is_not_computed_with_as_if_it_were(tmp_path):
    saved = {"directory": str(tmp_path)}
    found = on_world(
        2,
        [
            (differentiates_twice,),
            (train_small,),
            (partial(train_small, ids=[0, 1, 2, 3, 4, 6]),),
            (partial(train_small, ids=[0, 1, 2, 3, 4, -1]),),
            (partial(train_small, penalty=0.1),),
            (partial(train_small, sync_batchnorm=True),),
            (partial(train_small, sparse=True),),
            (partial(train_small, again="up.weight"),),
            (partial(train_small, again="up.bias"),),
            (partial(train_small, again="batch_norm.weight"),),
            (partial(train_small, averages=True),),
            (partial(train_small, averages=True, strategy="fsdp", directory=str(tmp_path / "fsdp")),),
            (partial(train_small, hidden=4, **saved),),
            (partial(train_small, hidden=8, resume=True, **saved),),
        ],
    )
    for away, known, beside, odd in found[0]:
        assert odd == [], "what load_state_dict gives of whole tensors"
        assert away < 1e-6
        assert known == 6
        assert beside == [(5, 3), (5,)]
    words = [
        "run.save(model, path)",
        "index out of range",
        "index out of range",
        "the sum of the losses",
        "sync_batchnorm with tensor=2",
        "sparse=True",
        "part of up.weight",
        "part of up.bias",
        "run.save(model, path)",
        "kept_values.average.0 on rank 1",
        "of which this rank holds a part, as of the parameter",
        "run.save(model, path)",
        "was saved, and here it has shape (8, 4)",
    ]
    for said, (first, _) in zip(words, found[1:], strict=True):
        assert said in first


# ---- plans -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_parts_and_boxes_of_all_ranks_are_the_whole(ranks, length, shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] = ranks * length
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    stored = StoredTensor(shape, whole.dtype, lambda start, size: _box(whole, start, size))
    covered = torch.full(shape, -1)
    for rank in range(ranks):
        division = TensorDivision(dim, rank * length, length, tuple(shape))
        own = division.own(whole)
        assert torch.equal(own, division.own(stored).whole())
        assert own.is_contiguous()
        rows = own[len(own) // 2 :]  # a box of the part, as of a rank that holds some of its rows
        start = (len(own) // 2, *(0 for _ in shape[1:]))
        assert torch.equal(division.own(stored).rows(start[0], len(own)), rows)
        for part in (own, TensorShard(rows, start, division.local_shape, own.dtype)):
            shard = division.shard(part)
            assert shard.shape == tuple(shape)
            slots = tuple(slice(a, a + n) for a, n in zip(shard.start, shard.tensor.shape, strict=True))
            covered[slots] = shard.tensor
        assert division.shard(TensorShard.absent(division.local_shape, own.dtype)).tensor is None
    assert torch.equal(covered, whole)


def _box(whole, start, size):
    return whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))].clone()


def test_each_layer_gets_its_style_and_each_tensor_its_part():
    model = Gpt()
    styles = styles_of(model, PLAN)
    assert styles["blocks.1.attention.k"] == "colwise"
    assert styles["head"] == "colwise_gather_output"
    divisions = divisions_of(model, styles, 1, 2)
    assert divisions["blocks.0.up.weight"] == TensorDivision(0, 20, 20, (40, WIDTH))
    assert divisions["blocks.0.up.bias"] == TensorDivision(0, 20, 20, (40,))
    assert divisions["blocks.0.down.weight"] == TensorDivision(1, 20, 20, (WIDTH, 40))
    assert divisions["head.weight"] == divisions["words.weight"]
    assert not [name for name in divisions if "norm" in name or name == "blocks.0.down.bias"]


def test_a_model_brings_its_own_plan():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.tp_plan = {"*": "colwise_rep", "of.another": "rowwise"}
    assert styles_of(model, None) == {"0": "colwise_gather_output", "1": "colwise_gather_output"}
    model.tensor_parallel_plan = {"0": "rowwise_rep"}
    assert styles_of(model, None) == {"0": "rowwise_split_input"}
    assert styles_of(model, {}) == {}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (None, "has none"),
        ({"block.*": "colwise"}, "no layer 'block.*'"),
        ({"head": "columns"}, "'columns'"),
        ({"head": SequenceParallel()}, "not known here"),
        ({"head": ColwiseParallel(output_layouts=Shard(1))}, "not known here"),
        ({"head": ColwiseParallel(use_local_output=False)}, "not known here"),
        ({"words": "embedding_rowwise", "*": "colwise"}, "and as"),
        ({"norm": "colwise"}, "it is a LayerNorm"),
        ({"norm": "replicated_with_grad_allreduce"}, "divides no layer"),
        ({"head": "colwise_gather_output"}, "words.weight and head.weight are one tensor"),
        ({"odd": "rowwise"}, "no multiple of 2"),
        ({"torchs.out_proj": "rowwise"}, "reads its weight without calling it"),
        ({"limited": "rowwise"}, "scale_grad_by_freq"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused_in_words(plan, words):
    model = Gpt()
    model.odd, model.torchs, model.limited = (
        nn.Linear(5, 4),
        nn.MultiheadAttention(4, 2),
        nn.Embedding(4, 4, scale_grad_by_freq=True),
    )
    with pytest.raises(UsageError, match=words):
        divisions_of(model, styles_of(model, plan), 0, 2)


@pytest.mark.parametrize(
    ("nodes", "ranks", "words"),
    [((0,) * 3, 2, "divide 3 ranks"), ((0, 0, 0, 1, 1, 1), 2, "ranks 2 to 3"), ((0,), 2, "divide 1 rank ")],
)
def test_tensor_groups_are_neighbours_on_one_machine(nodes, ranks, words):
    check_groups((0, 0, 1, 1), 2, "fsdp")
    with pytest.raises(SettingError, match=words):
        check_groups(nodes, ranks, "fsdp")


def train_transformer(strategy, tied):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    words = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(0))
    with Run(seed=1, strategy=strategy, clip_norm=1.0) as run:
        net = run.model(Qwen3ForCausalLM(config))
        run.optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        batches = run.loader(TensorDataset(words[:, :-1], words[:, 1:]), global_batch=16, micro_batch=4)
        for _ in run.epochs(2):
            for inputs, targets in run.train(batches):
                run.step(F.cross_entropy(net(input_ids=inputs).logits.flatten(0, 1), targets.flatten()))
        return run.state_dict(net)


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_is_divided_by_the_plan_that_it_brings(tied):
    pytest.importorskip("transformers")
    alone, two, four = (
        run_ranks(train_transformer, ranks, strategy, tied, timeout_s=300)[0]
        for ranks, strategy in ((1, "none"), (2, "fsdp:tensor=2"), (4, "fsdp:tensor=2"))
    )
    assert state_hash(two) == state_hash(four)
    assert max(float((alone[name] - two[name]).abs().max()) for name in alone) < 1e-6
