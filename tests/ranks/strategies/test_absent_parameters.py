"""Values given after ``run.model`` where other ranks hold some of the parameters."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.errors import UsageError
from lockstep.run import Run
from lockstep.testing import run_each
from worlds import on_world


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layers = nn.Embedding(11, 6), nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, numbers):
        x = self.words(numbers)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@torch.no_grad()
def initialise(module):
    if isinstance(module, nn.Linear):
        nn.init.kaiming_uniform_(module.weight)
        nn.init.orthogonal_(module.weight.T)
        nn.init.sparse_(module.weight, 0.3)
        module.bias.data.normal_().add_(torch.randn_like(module.bias)).mul_(F.dropout(module.bias, 0.5))


def values(strategy):
    """Of all layers, and what is drawn next."""
    with Run(seed=1, strategy=strategy) as run:
        net = run.model(Net())
        torch.manual_seed(5)
        net.layers.apply(initialise)
        return {**run.state_dict(net), "drawn next": torch.rand(3)}


def clamped_in_loop(strategy, leaves):
    with Run(seed=1, strategy=strategy) as run:
        net = run.model(Net())
        if run.rank == 0 and strategy == "hybrid":
            assert "random numbers are drawn for words.weight" in refused(nn.init.trunc_normal_, net.words.weight)
        with torch.no_grad():
            net.words.weight.mul_(0.5)  # on all ranks
        run.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        for x in run.train(run.loader(torch.arange(8), global_batch=4, micro_batch=2)):
            if run.step(net(x).square().mean()):
                net.words.weight.data.clamp_(-0.5, 0.5)
                if leaves:
                    break


def said_of_stages():
    with Run(seed=1, strategy="pipeline") as run:
        net = run.model(Net())
        changes = [nn.init.trunc_normal_, lambda weight: weight.norm().item(), lambda weight: weight.multinomial(2)]
        absent = [p for p in net.parameters() if p.device.type == "meta"]
        return [refused(change, absent[0]) for change in changes]


def refused(change, tensor):
    with pytest.raises(UsageError) as caught:
        change(tensor)
    return str(caught.value)


def test_ranks_draw_alike_or_it_is_refused():
    whole = on_world(1, [(values, "none")])[0][0]
    by_stages, of_stages = on_world(2, [(values, "pipeline"), (said_of_stages,)])
    drawn = [state.pop("drawn next") for state in (whole, *by_stages)]
    assert all(torch.equal(drawn[0], one) for one in drawn)
    assert [name for name, value in whole.items() if not torch.equal(value, by_stages[0][name])] == []
    for said in (*of_stages[0], *of_stages[1]):
        assert "depends on the values of a parameter that lies on another rank" in said


@pytest.mark.parametrize(
    ("strategy", "leaves"),
    [("hybrid", False), ("parameter-server", False), ("parameter-server", True), ("parameter-server:mode=async", True)],
)
def test_what_servers_do_not_run_is_refused(strategy, leaves):
    worker, _ = run_each(clamped_in_loop, 2, strategy, leaves)
    assert "was changed in the loop of run.train(...), which servers" in str(worker.error)
