"""Tensors that several blocks of a divided model read: their gradients are added in the order of plain torch.

memory ----+-----+--+--------+--+        plain torch adds the gradients of all reads one by one, the last read first
           |     |  |        |  |
x ---- block 0 --+--+- block 1 --+---- loss
"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep.errors import UsageError
from lockstep.run import Run
from lockstep.testing import run_ranks, state_hash
from worlds import trying_few

WIDTH = 12


class Reader(nn.Module):
    """Reads the memory three times, and what comes from the block before it four times."""

    def __init__(self):
        super().__init__()
        self.key, self.value, self.bias = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, memory):
        seen = torch.softmax(self.norm(x) * self.key(memory), -1) * self.value(memory)
        return x + torch.tanh(seen * x) + self.bias(memory) * x


class HandingOn(Reader):
    """Gives another memory, or the memory as it was: each second block by the micro-batch, so ranks differ."""

    def __init__(self, number):
        super().__init__()
        self.always = number % 2 == 0

    def forward(self, x, memory):
        first, second, *_ = x.detach().sum(1)
        return super().forward(x, memory), memory * 0.5 if self.always or first < second else memory


class Net(nn.Module):
    """Blocks of which `calls` says how they are called."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls
        self.first, self.memory = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([HandingOn(number) if calls in HANDING_ON else Reader() for number in range(4)])

    def forward(self, x):
        return self.calls(self.blocks, self.first(x), torch.tanh(self.memory(x)))


def in_a_row(blocks, x, memory):
    for block in blocks:
        x = block(x, memory)
    return x


def by_name(blocks, x, memory):
    for block in blocks:
        x = block(x=x, memory=memory) + memory
    return x


def all_hidden_states(blocks, x, memory):
    """The sum of all that blocks give, as a head that mixes all layers takes it."""
    hidden = [x]
    for block in blocks:
        hidden.append(block(hidden[-1], memory))
    return torch.stack([state * (number + 1) for number, state in enumerate(hidden)]).sum(0) + hidden[1] * hidden[2]


def ladder(blocks, x, memory):
    """Down, and up again beside what was on the way down."""
    kept = [x]
    for block in blocks[:2]:
        kept.append(block(kept[-1], memory))
    for block in blocks[2:]:
        x = block(x, kept.pop()) * kept[-1]
    return x


def side_by_side(blocks, x, memory):
    return sum(block(x, memory) * number for number, block in enumerate(blocks, 1))


def memory_of_blocks(blocks, x, memory):
    """What a block gives is memory and input for all later ones."""
    for block in blocks:
        memory = x = block(x, memory)
        memory = memory * x
    return x


def again_and_again(blocks, x, memory):
    for block in (blocks[0], blocks[0], *blocks, blocks[3], blocks[1]):
        x = block(x, memory)
    return x


def in_place(blocks, x, memory):
    for block in blocks:
        x = block(x, memory)
        x += memory
    return x


def recomputed(blocks, x, memory):
    for block in blocks:
        x = checkpoint(block, x, memory, use_reentrant=False)
    return x


def recomputed_by_pairs(blocks, x, memory):
    for pair in (blocks[:2], blocks[2:]):
        x = checkpoint(in_a_row, pair, x, memory, use_reentrant=True)
    return x


def handed_on(blocks, x, memory):
    for block in blocks:
        x, memory = block(x, memory)
    return x


def handed_on_twice(blocks, x, memory):
    for block in (*blocks, *blocks):
        x, memory = block(x, memory)
    return x + memory


def replaced_by_hooks(blocks, x, memory):
    for block in blocks:
        handle = block.register_forward_hook(lambda _module, _inputs, output: output * 1.1)
        x = block(block(x, memory), memory)
        handle.remove()
    return x


HANDING_ON = (handed_on, handed_on_twice)
SHAPES = (
    *(in_a_row, by_name, all_hidden_states, ladder, side_by_side, memory_of_blocks, again_and_again, in_place),
    *(recomputed, recomputed_by_pairs, *HANDING_ON, replaced_by_hooks),
)
MICRO_BATCH, STEPS = 6, 2


def data():
    return torch.randn(4 * MICRO_BATCH * STEPS, WIDTH, generator=torch.Generator().manual_seed(0))


def gradients(net, x):
    net.zero_grad()
    (F.mse_loss(net(x), x) / 4).backward()
    return [p.grad for p in net.parameters()]


def by_hand(calls):
    """Plain torch: steps of four micro-batches, whose gradients are added in pairs."""
    torch.manual_seed(0)
    net = Net(calls)
    parameters = list(net.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    for step in data().split(4 * MICRO_BATCH):
        found = [gradients(net, x) for x in step.split(MICRO_BATCH)]
        for parameter, a, b, c, d in zip(parameters, *found, strict=True):
            parameter.grad = (a + b) + (c + d)
        optimizer.step()
    return state_hash(net)


def by_lockstep(calls, strategy):
    """The trained bits, and how many blocks at most are gathered while a backward pass computes in one of them."""
    with Run(strategy=strategy) as run:
        torch.manual_seed(0)
        net, seen = run.model(Net(calls)), []
        run.optimizer(torch.optim.AdamW(net.parameters(), lr=0.01))

        def look(_gradient):
            seen.append(sum(not isinstance(block.bias.weight, DTensor) for block in net.blocks))

        def look_later(_module, _inputs, output):
            if output.requires_grad:
                output.register_hook(look)

        for block in net.blocks:
            block.value.register_forward_hook(look_later)
        for batch in run.train(
            run.loader(data(), global_batch=4 * MICRO_BATCH, micro_batch=MICRO_BATCH, shuffle=False)
        ):
            run.step(F.mse_loss(net(batch), batch))
        state = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in net.state_dict().items()}
        return state_hash(state), max(seen)


def trained(strategy, shapes):
    return {calls.__name__: by_lockstep(calls, strategy) for calls in shapes}


@pytest.mark.parametrize(
    ("ranks", "strategy", "shapes"),
    [
        (2, "fsdp", SHAPES),
        pytest.param(
            *(3, "fsdp:wrap=Reader+Linear", (in_a_row, side_by_side, recomputed, recomputed_by_pairs)),
            marks=pytest.mark.campaign,
        ),
        pytest.param(3, "fsdp:wrap=HandingOn+Linear", HANDING_ON, marks=pytest.mark.campaign),
        pytest.param(4, "hsdp:shard=2", (all_hidden_states, ladder), marks=pytest.mark.campaign),
    ],
)
def test_bits_are_those_of_plain_torch_and_blocks_are_freed_at_once(ranks, strategy, shapes):
    wanted = {calls.__name__: by_hand(calls) for calls in shapes}
    for found in run_ranks(trying_few, ranks, trained, strategy, shapes, timeout_s=250):
        assert {name: bits for name, (bits, _) in found.items()} == wanted
        for name, (_, gathered) in found.items():  # a pair is recomputed before its backward pass
            assert gathered <= (2 if name == recomputed_by_pairs.__name__ else 1), name


class Hidden:
    """An object in which torch looks for no tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


class Hiding(Reader):
    def forward(self, x, memory):
        return Hidden(super().forward(x, memory))


def hidden(blocks, x, memory):
    for block in blocks:
        x = block(x, memory).tensor
    return x


def hides(whole):
    with Run(strategy="fsdp") as run:
        net = Net(hidden)
        net.blocks = nn.ModuleList([Hiding() for _ in range(2)])
        net = run.model(net, find_unused_parameters=whole)
        run.optimizer(torch.optim.SGD(net.parameters(), lr=0.01))
        try:
            for batch in run.train(run.loader(data(), global_batch=4 * MICRO_BATCH, micro_batch=MICRO_BATCH)):
                run.step(F.mse_loss(net(batch), batch))
        except UsageError as error:
            return str(error)


def test_a_block_whose_outputs_torch_does_not_find_is_refused_with_a_way_out_that_works():
    for said in run_ranks(hides, 2, False):
        assert "the block returns tensors where torch does not find them, such as in an object of its own class" in said
        assert "or say run.model(model, find_unused_parameters=True)" in said
    assert run_ranks(hides, 2, True) == [None, None]
