"""Which modules are gathered as one, and computing them twice."""

import copy

import pytest
import torch
from torch import nn

from lockstep.errors import SettingError
from lockstep.strategies.sharded.wrapping import blocks_of, recompute


class Layer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return self.mix(self.attention(x, x, x)[0])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.scale = nn.ModuleDict({"tiny": nn.Linear(1, 1, bias=False), "none": nn.ReLU()})
        self.out = nn.Linear(8, 100, bias=False)


def names(model, wrap):
    paths = {module: path for path, module in model.named_modules()}
    return [paths[block] for block in blocks_of(model, wrap)]


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        ("auto", ["layers.0", "layers.1"]),
        ("whole", []),
        ("Layer", ["layers.1", "layers.0"]),
        ("MultiheadAttention+Layer", ["layers.1.attention", "layers.1", "layers.0.attention", "layers.0"]),
        ("0.8K", ["words", "layers.0", "layers.1", "out"]),
        ("250", ["words", *(f"layers.{i}.{of}" for i in (0, 1) for of in ("attention", "mix.0", "mix.2")), "out"]),
        ("1G", []),
    ],
)
def test_blocks(wrap, expected):
    assert names(Model(), wrap) == expected


def test_no_block_holds_a_parameter_that_others_hold_too():
    model = Model()
    model.out.weight = model.words.weight
    model.layers[1].mix[0].weight = model.layers[0].mix[0].weight
    assert names(model, "0.8K") == []
    assert names(model, "250") == ["layers.0.attention", "layers.0.mix.2", "layers.1.attention", "layers.1.mix.2"]


def test_a_module_at_two_places_lies_in_a_block_only_where_both_do():
    model = Model()
    model.layers[0].mix[0] = model.layers[1].mix[0]
    assert names(model, "auto") == []
    assert names(model, "Linear+Layer") == [
        "out",
        "scale.tiny",
        "layers.1.mix.2",
        "layers.0.mix.2",
        "layers.0.mix.0",
    ]


def test_members_of_a_sequential_model_are_blocks():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert names(model, "auto") == ["0", "2.0", "2.1"]


def test_an_unknown_class_is_refused():
    with pytest.raises(
        SettingError, match=r"wrap=Layer\+Lair: Model has no module of class 'Lair'; it has Embedding, L"
    ):
        blocks_of(Model(), "Layer+Lair")


def test_computed_twice_moves_buffers_once_and_draws_the_same_numbers():
    results = []
    for twice in (False, True):
        torch.manual_seed(0)
        calls = []
        block = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
        block[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        if twice:
            recompute(block)
        inputs = torch.randn(8, 4)
        block(inputs).square().sum().backward()
        assert len(calls) == 1 + twice
        with torch.no_grad():
            block(inputs)
        assert len(calls) == 2 + twice
        results.append([*(p.grad for p in block.parameters()), *block.buffers()])
    assert all(torch.equal(once, again) for once, again in zip(*results, strict=True))


def test_a_copy_of_a_block_that_is_computed_twice_computes_with_its_own_weights():
    block = nn.Linear(3, 3)
    recompute(block)
    twin, x = copy.deepcopy(block), torch.ones(2, 3)
    nn.init.zeros_(twin.weight)
    nn.init.ones_(twin.bias)
    assert torch.equal(twin(x), torch.ones(2, 3))
    twin(x).sum().backward()
    assert twin.bias.grad is not None
    assert block.bias.grad is None
