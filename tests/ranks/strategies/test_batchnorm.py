"""BatchNorm over all ranks is BatchNorm over the batch of all ranks."""

import copy
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lockstep.collectives import open_group
from lockstep.run import Run
from lockstep.strategies import synchronize_batchnorm
from lockstep.strategies.parts.batchnorm import normalises_over_ranks
from lockstep.testing import state_hash
from lockstep.world import World
from worlds import on_world

RANKS = 3

#: What is normalised: the layer, the shape of a sample, and how many samples each rank holds.
CASES = {
    "plain": (lambda: nn.BatchNorm1d(4), (4,), (5, 5, 5)),
    "unequal": (lambda: nn.BatchNorm1d(4), (4, 3), (1, 7, 2)),
    "one holds nothing": (lambda: nn.BatchNorm1d(4), (4,), (3, 0, 2)),
    "one value each": (lambda: nn.BatchNorm1d(4), (4,), (1, 1, 1)),
    "images": (lambda: nn.BatchNorm2d(3, momentum=0.3, eps=1e-3), (3, 4, 5), (2, 3, 1)),
    "volumes": (lambda: nn.BatchNorm3d(2), (2, 2, 3, 2), (2, 1, 2)),
    "cumulative": (lambda: nn.BatchNorm1d(4, momentum=None), (4,), (2, 3, 4)),
    "not affine": (lambda: nn.BatchNorm1d(4, affine=False), (4,), (2, 3, 4)),
    "no statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (4,), (2, 3, 4)),
    "frozen scale": (lambda: _frozen(nn.BatchNorm1d(4)), (4,), (2, 3, 4)),
}


def _frozen(layer):
    layer.weight.requires_grad_(False)
    return layer


def net(name, dtype):
    torch.manual_seed(1)
    layer = CASES[name][0]()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return nn.Sequential(nn.Identity(), layer).to(dtype)


def batch(name, dtype, step):
    """The inputs of all ranks, far from zero, and what each output weighs in the loss."""
    _, shape, sizes = CASES[name]
    generator = torch.Generator().manual_seed(step)
    both = torch.randn(2, sum(sizes), *shape, generator=generator, dtype=torch.float64)
    if len(shape) == 3:
        both = both.transpose(2, -1).contiguous().transpose(2, -1)  # as in channels last
    return (both[0] * 3 + 20).to(dtype), both[1].to(dtype)


def passes(model, name, dtype, pick):
    """Two steps of training and an evaluation: outputs, gradients and buffers."""
    found = []
    for step in range(2):
        x, weights = (pick(t) for t in batch(name, dtype, step))
        x.requires_grad_()
        y = model(x)
        (y * weights).sum().backward()
        found.append((y.detach(), x.grad))
    model.eval()  # without running statistics, each rank normalises its own batch then
    if any(True for _ in model.buffers()):
        found.append((model(pick(batch(name, dtype, 9)[0])).detach(), torch.zeros(0)))
    return found, [p.grad for p in model.parameters()], list(model.buffers())


def over_ranks(name, dtype):
    """How far each thing is from the reference, which is computed here on the batch of all ranks."""
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 60)
    sizes = CASES[name][2]
    start = sum(sizes[: group.rank])
    pick = lambda tensor: tensor[start : start + sizes[group.rank]].clone()  # noqa: E731
    one, many = net(name, dtype), net(name, dtype)
    own = list(many.parameters()), list(many.buffers())
    assert synchronize_batchnorm(many, group) is many
    assert (list(map(id, many.parameters())), list(map(id, many.buffers()))) == tuple(list(map(id, o)) for o in own)
    copied = copy.deepcopy(many)
    (whole, true_gradients, true_buffers) = passes(one, name, dtype, torch.clone)
    results = []
    for model in (many, copied):
        here, gradients, buffers = passes(model, name, dtype, pick)
        summed = [None if g is None else group.sum_tensor(g, "gradients") for g in gradients]
        pairs = [
            (mine, pick(true) if len(true) else true)
            for a, b in zip(here, whole, strict=True)
            for mine, true in zip(a, b, strict=True)
        ]
        pairs += [(a, b) for a, b in zip(summed, true_gradients, strict=True) if a is not None]
        pairs += list(zip(buffers, true_buffers, strict=True))
        assert [g is None for g in summed] == [g is None for g in true_gradients]
        results.append(max(_away(a, b) for a, b in pairs))
    hashes = group.gather_objects(state_hash(list(many.buffers())), "buffers")
    group.barrier("end of the case")
    group.close()
    return max(results), len(set(hashes)), repr(many[1])


def _away(a, b):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def too_few_values():
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 60)
    layer = synchronize_batchnorm(nn.BatchNorm1d(2), group)
    with pytest.raises(ValueError, match="expected more than 1 value per channel while training, got 1 on all ranks"):
        layer(torch.ones(int(group.rank == 1), 2))
    with pytest.raises(ValueError, match="expected at least 2D input"):
        layer(torch.ones(2))
    group.barrier("end of the case")
    group.close()


def half():
    """Under autocast to bf16: formats as torch's own layer gives, on the same batch on each rank."""
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 60)
    one, many = nn.BatchNorm1d(4), synchronize_batchnorm(nn.BatchNorm1d(4), group)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    outs = []
    for layer in (one, many):
        mine = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(mine)
        y.float().pow(3).sum().backward()
        outs.append((y.detach(), mine.grad, layer.running_mean))
    group.barrier("end of the case")
    group.close()
    return [(str(a.dtype), str(b.dtype), _away(a.float(), b.float())) for a, b in zip(*outs, strict=True)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x):
        return self.layers(x)


def learn(sync):
    """Two steps of two micro-batches on each of three ranks; the parameters, the buffers and the hash."""
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(2))
    with Run(seed=3, sync_batchnorm=sync) as run:
        model = run.model(Net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        for _ in run.epochs(2):
            for x in run.train(run.loader(data, global_batch=24, micro_batch=4, shuffle=False)):
                run.step(model(x).square().mean())
        net = getattr(model, "module", model)
        return [p.detach().clone() for p in net.parameters()], list(net.buffers()), state_hash(net)


def learned_by_hand():
    """`learn` on one rank: each pass holds the first micro-batches of all three ranks, the other one the second."""
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(2))
    with Run(seed=3) as run:
        model = run.model(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    buffers = list(model.buffers())
    for _ in range(2):
        base, moved = [b.clone() for b in buffers], []
        for first in (0, 4):
            for b, was in zip(buffers, base, strict=True):
                b.copy_(was)
            rows = torch.cat([data[start + first : start + first + 4] for start in (0, 8, 16)])
            (model(rows).square().mean() / 2).backward()
            moved.append([b.clone() for b in buffers])
        for b, one, other in zip(buffers, *moved, strict=True):
            b.copy_((one + other) / 2)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters()), buffers


def test_on_three_ranks():
    calls = [(over_ranks, name, torch.float64) for name in CASES]
    calls += [(over_ranks, name, torch.float32) for name in ("unequal", "images")]
    more = [(too_few_values,), (half,), (learn, True), (learn, True)]
    found = on_world(RANKS, [*calls, *more])
    for call, ranks in zip([*calls, *more], found, strict=True):
        failed = [result for result in ranks if isinstance(result, str)]
        assert not failed, f"{call}: {failed[0]}"
    for (_, name, dtype), ranks in zip(calls, found, strict=False):
        for away, different_buffers, shown in ranks:
            assert away < (1e-12 if dtype == torch.float64 else 1e-4), (name, dtype, away)
            assert different_buffers == 1
            assert shown.startswith("AcrossRanks(")
    _, halves, once, again = found[len(calls) :]
    for rank in halves:
        for one, many, away in rank:
            assert one == many
            assert away < 0.1, rank
    assert len({digest for *_, digest in (*once, *again)}) == 1
    parameters, buffers = learned_by_hand()
    for mine, true in zip([*once[0][0], *once[0][1]], [*parameters, *buffers], strict=True):
        torch.testing.assert_close(mine, true.detach())
    assert not torch.allclose(once[0][0][0], learn(False)[0][0])


def test_on_gpus_layers_are_torchs_and_stay_the_modules_that_they_were():
    """What is made for a GPU computes on a CPU only for itself, which is enough to see a hook called."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.3, bias=False), nn.BatchNorm2d(4).eval())
    modules, held, called = list(model.modules()), list(model.state_dict(keep_vars=True).values()), []
    model[1].register_forward_hook(lambda *_: called.append(1))
    model[1].of_script = "kept"
    group = SimpleNamespace(device=torch.device("cuda"), process_group=object())
    assert synchronize_batchnorm(model, group) is model
    assert list(map(id, model.modules())) == list(map(id, modules))
    assert list(map(id, model.state_dict(keep_vars=True).values())) == list(map(id, held))
    assert [type(layer) for layer in model[1:]] == [nn.SyncBatchNorm] * 2
    assert all(layer.process_group is group.process_group for layer in model[1:])
    assert vars(model[2]).keys() == vars(nn.SyncBatchNorm(4)).keys(), "torch's layer has all that it reads"
    assert (model[1].momentum, model[1].of_script, model[1].training, model[2].training) == (0.3, "kept", True, False)
    assert normalises_over_ranks(model)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model[1](x), nn.functional.batch_norm(x, None, None, model[1].weight, training=True))
    assert called == [1]


def test_one_rank_keeps_its_layers():
    with Run(sync_batchnorm=True) as run:
        assert type(run.model(nn.BatchNorm1d(2))) is nn.BatchNorm1d
