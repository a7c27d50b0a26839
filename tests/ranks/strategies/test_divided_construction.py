"""Models that no rank holds whole while they are made: values and random numbers are those of one rank."""

import copy
import io
import os
import random
import weakref

import numpy
import pytest
import torch
from torch import nn

from lockstep.collectives import StoredTensor, open_group
from lockstep.errors import MismatchError, UsageError
from lockstep.strategies.not_whole.divided_construction import DividedConstruction
from lockstep.testing import run_ranks
from lockstep.world import World


class Gpt(nn.Module):
    """As many write it: every module is initialised once more at the end, some in another way, and two share."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(31, 20, padding_idx=3), nn.Linear(20, 31, bias=False)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(20, 2, 40, batch_first=True) for _ in range(2)])
        self.place = nn.Parameter(torch.zeros(1, 9, 20))
        self.register_buffer("mask", torch.tril(torch.ones(40, 40)))
        self.head.weight = self.table.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("out_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / 2)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


class Reads(nn.Module):
    """What it draws, it reads again: as numbers, through views, copies and decompositions, and as NumPy."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(30, 20), nn.Linear(20, 30)
        self.b.weight.data.mul_(self.a.weight.norm())
        with torch.no_grad():
            self.a.weight[3:7].fill_(0.5)
            self.a.weight.t()[2] += self.b.weight.sum(1)[0].item()
            self.b.weight.copy_(self.a.weight.t().clone())
        self.f = nn.Parameter(torch.randn(20, 20))
        self.h, itself = nn.Parameter(torch.randn(20, 20)), self.f.data
        corner, self.g = self.h.data[0, 1], nn.Linear(40, 40)
        with torch.no_grad():
            self.g.weight.mul_(2)
            self.f.copy_(itself)  # both overwrite what they read
            self.h.fill_(corner)
        nn.init.orthogonal_(self.a.weight, 1.4)
        nn.init.trunc_normal_(self.b.weight, std=0.3)
        self.c = copy.deepcopy(self.b)
        self.plain = self.a.weight.detach() * 2  # neither a parameter nor a buffer
        self.numbers = self.a.weight.detach().numpy()
        self.d = nn.Parameter(torch.from_numpy(self.numbers * 3))
        self.e = nn.Parameter(torch.randn(600).view(20, 30))
        nn.init.sparse_(self.e, 0.2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(30, 30))
        file = io.BytesIO()
        torch.save(self.b.state_dict(), file)
        file.seek(0)
        self.loaded = nn.Linear(20, 30)
        self.loaded.load_state_dict(torch.load(file))
        self.lstm, self.norm = nn.LSTM(20, 20, 2, bidirectional=True), nn.BatchNorm1d(600)


CHANGES = (
    lambda one, _, __: one.normal_(),
    lambda one, _, __: one.uniform_(-1, 1),
    lambda one, other, _: one.mul_(other.mean()),
    lambda one, other, _: one.view(-1)[: len(other)].copy_(other.view(-1)[: len(other)].mean()),
    lambda one, other, _: one.add_(other.sum().item() / 1e3),
    lambda one, _, __: one[0].zero_(),
    lambda one, _, there: there.append(one.clone()),
    lambda one, _, __: one.copy_(one.flip(0)),
    lambda one, _, __: setattr(one, "data", one.data.to(torch.float64).to(torch.float32)),
)


def program(number):
    """A constructor that does anything to tensors of any size, in any order."""

    def make():
        say, module = random.Random(number), nn.Module()
        there = []
        for place in range(say.randrange(1, 9)):
            shape = [say.randrange(1, 40) for _ in range(say.randrange(1, 4))]
            module.register_parameter(
                f"p{place}", nn.Parameter(say.choice([torch.randn, torch.rand, torch.ones])(shape))
            )
            there.append(getattr(module, f"p{place}"))
            for _ in range(say.randrange(5)):
                one, other = say.choice(there), say.choice(there)
                with torch.no_grad():
                    say.choice(CHANGES)(one, other, there)
        return module

    return make


CASES = {
    "gpt": Gpt,
    "reads": Reads,
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24), 3, enable_nested_tensor=False),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 30, 3), nn.Bilinear(8, 9, 7)
    ),
    **{f"program {n}": program(n) for n in range(5)},
}


def state_of(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: t.detach().clone() for name, t in tensors.items()}


def same_bits(one, other):
    return one.shape == other.shape and bytes(one.contiguous().numpy()) == bytes(other.contiguous().numpy())


def plain(make):
    torch.manual_seed(7)
    return state_of(make()), torch.rand(3)


def constructed_on_a_rank():
    """Of each case: whether rows, whole tensors and the random numbers that follow are those of one rank."""
    found, group = {}, open_group(World.from_env(os.environ), torch.device("cpu"), 30)
    for name, make in CASES.items():
        for whole_bytes in (0,) if name.startswith("program") else (0, 5000):
            expected, then = plain(make)
            construction = DividedConstruction(group, group, least_bytes=64, whole_bytes=whole_bytes)
            torch.manual_seed(7)
            model = construction.construct(make)
            same = [torch.equal(torch.rand(3), then)]
            away = [p.untyped_storage().nbytes() == 0 for p in model.parameters() if p.numel() >= 16]
            if name == "reads":
                same += [torch.equal(model.plain, expected["a.weight"] * 2)]
                same += [numpy.array_equal(model.numbers, expected["a.weight"].numpy())]
            copies = dict(model.named_parameters())
            for n, p in list(copies.items())[::2]:
                construction.restore_rows([p])
                high = -(-len(p) // group.size)
                rows = slice(group.rank * high, (group.rank + 1) * high)
                same.append(same_bits(p.detach()[rows], expected[n][rows]))
            construction.restore(model.parameters())
            for n, value in state_of(model).items():
                if n in list(copies)[::2]:
                    continue
                same.append(same_bits(value, expected[n]))
            found[name, whole_bytes] = all(same), sum(away) / max(1, len(away))
    group.close()
    return found


def test_values_and_random_numbers_are_those_of_one_rank():
    for found in run_ranks(constructed_on_a_rank, 2, timeout_s=100):
        assert [case for case, (same, _) in found.items() if not same] == []
        assert found["gpt", 0][1] == 1.0, "every parameter was divided at the end"


def constructed_with_a_tensor_that_one_rank_holds():
    """The model's values, and what a tensor holds that only rank 0 has kept beside it."""
    group, held = open_group(World.from_env(os.environ), torch.device("cpu"), 30), []

    def make():
        weight = torch.randn(50, 10)
        if group.rank == 0:
            held.append(weight)
        return nn.Linear(10, 50)

    expected, _ = plain(make)
    held.clear()
    construction = DividedConstruction(group, group, least_bytes=64, whole_bytes=0)
    torch.manual_seed(7)
    model = construction.construct(make)
    construction.restore(model.parameters())
    same = all(same_bits(value, expected[name]) for name, value in state_of(model).items())
    group.close()
    return same, [bool(one.isnan().all()) for one in held]


def test_ranks_need_not_drop_a_tensor_at_the_same_moment():
    """Such as where the exchange has sent it last, and has not let go of it yet."""
    assert run_ranks(constructed_with_a_tensor_that_one_rank_holds, 2) == [(True, [True]), (True, [])]


class Peak(nn.Module):
    """Many large layers; remembers how many of their bytes were there at once."""

    def __init__(self):
        super().__init__()
        self.most, storages = 0, []
        for place in range(8):
            layer = nn.Linear(512, 512, bias=False)
            storages.append(weakref.ref(layer.weight))
            setattr(self, f"layer{place}", layer)
            with torch._C.DisableTorchFunction():
                held = sum(one().untyped_storage().nbytes() for one in storages)
            self.most = max(self.most, held)


def refused_on_a_rank():
    group, errors = open_group(World.from_env(os.environ), torch.device("cpu"), 30), []
    peak = DividedConstruction(group, group, whole_bytes=1 << 20).construct(Peak).most

    def differs():
        layer = nn.Linear(40, 40)
        nn.init.constant_(layer.weight, group.rank)
        return layer

    def differs_a_little():
        layer = nn.Linear(40, 40)
        nn.init.constant_(layer.bias, group.rank)
        return layer

    def empty():
        layer = nn.Linear(40, 40)
        layer.extra = nn.Parameter(torch.empty(40, 40))
        return layer

    for make, seed in ((differs, 7), (differs_a_little, 7), (empty, 7), (lambda: nn.Linear(40, 40), group.rank)):
        torch.manual_seed(seed)
        try:
            DividedConstruction(group, group).construct(make)
        except (MismatchError, UsageError) as error:
            errors.append((type(error), str(error)))
    group.close()
    return peak, errors


def test_few_layers_are_whole_at_once_and_ranks_that_differ_are_told():
    for peak, errors in run_ranks(refused_on_a_rank, 2):
        assert peak <= 3 << 20  # of 8 MiB: what may stay whole, the layer that is made, and one more
        assert [kind for kind, _ in errors] == [MismatchError, MismatchError, UsageError, MismatchError]
        assert "same model on every rank" in errors[0][1]
        assert "same model on every rank" in errors[1][1]
        assert "extra of Linear" in errors[2][1]
        assert "random numbers" in errors[3][1]


def test_a_stored_tensor_is_read_where_and_when_it_is_needed():
    content, asked = torch.arange(15.0).reshape(5, 3), []

    def read(start, shape):
        asked.append((start, shape))
        return content[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))].clone()

    stored = StoredTensor((5, 3), torch.float32, read)
    assert (stored.shape, stored.dtype, asked) == ((5, 3), torch.float32, [])
    assert torch.equal(stored.box((3, 0), (2, 3)), content[3:])
    assert asked == [((3, 0), (2, 3))]
    layer = nn.Linear(3, 5, bias=False)
    layer.load_state_dict({"weight": stored})
    assert torch.equal(layer.weight, content)
    assert torch.equal(stored + 1, content + 1)
    assert type(stored * 2) is torch.Tensor
    assert torch.equal(copy.deepcopy(stored), content)
    with pytest.raises(RuntimeError, match="size mismatch"):
        nn.Linear(3, 4, bias=False).load_state_dict({"weight": stored})
