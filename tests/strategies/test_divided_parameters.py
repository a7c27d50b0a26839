"""What a script does to divided parameters by itself, against the same done to a whole model by plain torch."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from lockstep.errors import MismatchError, UsageError
from lockstep.run import Run
from worlds import on_world


class Net(nn.Module):
    """Rows that neither two nor three ranks divide."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 7), nn.ModuleList([nn.Linear(7, 7) for _ in range(2)])
        self.norm, self.last = nn.BatchNorm1d(7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x):
        self.inside = self.blocks[0](self.first(x)).tanh()
        return self.last(self.norm(self.blocks[1](self.inside))) * self.scale


def each(change):
    """``change`` of every parameter, with no gradient."""

    @torch.no_grad()
    def changes(net):
        for parameter in net.parameters():
            change(parameter)

    return changes


def initialise(module):
    if isinstance(module, nn.Linear):
        nn.init.kaiming_uniform_(module.weight)
        nn.init.normal_(module.bias, std=0.1)


def another():
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return Net()


def orthogonal(net):
    nn.init.orthogonal_(net.last.weight)
    nn.init.eye_(net.first.weight)
    nn.init.trunc_normal_(net.blocks[0].weight, std=0.02)


def total_norm(net):
    return nn.utils.get_total_norm(list(net.parameters()))


def draws_of_a_generator(net):
    generator = torch.Generator().manual_seed(5)
    each(lambda p: p.normal_(generator=generator))(net)


CHANGES = {
    "apply": lambda net: net.apply(initialise),
    "modules' own": lambda net: net.apply(lambda m: getattr(m, "reset_parameters", lambda: None)()),
    "data": lambda net: net.last.weight.data.normal_(0, 0.02),
    "a matrix": orthogonal,
    "a generator": draws_of_a_generator,
    "integers": each(lambda p: p.random_(0, 10)),
    "exponential": each(lambda p: p.exponential_()),
    "masks": each(lambda p: p.mul_(torch.empty_like(p).bernoulli_(0.5))),
    "probabilities": each(lambda p: p.bernoulli_(p.sigmoid())),
    "noise": each(lambda p: p.add_(torch.randn_like(p), alpha=0.1)),
    "dropout": each(lambda p: p.copy_(F.dropout(p, 0.3, training=True))),
    "another state": lambda net: net.load_state_dict(another().state_dict()),
    "of a module": lambda net: net.blocks[1].load_state_dict(another().blocks[0].state_dict()),
    "copied": each(lambda p: p.copy_(torch.randn(p.shape, dtype=torch.float64))),
    "broadcast": each(lambda p: p.copy_(torch.randn(()))),
    "a column": lambda net: net.last.weight.data[:, 1:].fill_(2.0),
    "a column by index": lambda net: net.last.weight.data.__setitem__((slice(None), 1), 3.0),
    "the norm": each(lambda p: p.mul_(p.norm().item())),
    "the norm of all": lambda net: each(lambda p: p.div_(total_norm(net)))(net),
    "moments": each(lambda p: p.sub_(p.mean()).div_(1 + p.std(correction=0))),
    "moments of columns": lambda net: net.last.weight.data.sub_(net.last.weight.data.mean(0, keepdim=True)),
    "the greatest": each(lambda p: p.div_(3 + p.abs().max() + p.amin() + p.norm(float("inf")))),
    "sums of products": lambda net: net.blocks[0].weight.data.copy_(net.last.weight.t() @ net.last.weight),
    "parameters anew": lambda net: nn.Parameter(net.last.weight).data.mul_(2.0),
    "read by rows": lambda net: net.first.weight.data.mul_(net.last.weight.detach()[1, 1:3].t().sum()),
    "its copies": lambda net: net.load_state_dict(copy.deepcopy(net.state_dict())),
    "copies of parameters": lambda net: nn.init.normal_(copy.deepcopy(net.last.weight)),
}

#: What would be lost in silence.
LOST = {
    "a row": each(lambda p: p[0].fill_(1.0)),
    "a row by index": each(lambda p: p.__setitem__(0, 1.0)),
    "rows of a state": lambda net: net.state_dict()["last.weight"][1:].t().mul_(2.0),
    "a part": lambda net: net.last.weight.data.chunk(2)[1].normal_(),
    "as an output": lambda net: torch.mul(net.last.weight.data[0], 0.0, out=net.last.weight.data[0]),
    "an initialisation": lambda net: nn.init.constant_(net.last.weight.data[0], 1.0),
    "an activation": lambda net: F.relu(net.last.weight.data[0], inplace=True),
    "a list": lambda net: torch._foreach_mul_([net.last.weight.data[0]], 0.0),
    "in place": each(lambda p: p[1:].__iadd__(1.0)),
    "other data": lambda net: setattr(net.last.bias, "data", torch.ones(3)),
    "a vector": lambda net: nn.utils.vector_to_parameters(torch.ones(1000), net.parameters()),
}


def state_of(net):
    """All of it, and what is drawn next."""
    state = {n: t.full_tensor() if isinstance(t, DTensor) else t.clone() for n, t in net.state_dict().items()}
    return {**state, "drawn next": torch.rand(3)}


def refused(kind, change, net):
    with pytest.raises(kind) as caught:
        change(net)
    return str(caught.value)


def changes_on_ranks():
    different, lost = [], {}
    with Run(seed=1, strategy="fsdp") as run:
        for name, change in CHANGES.items():
            plain = Net()
            states = []
            for net in (plain, run.model(copy.deepcopy(plain))):
                torch.manual_seed(7)
                change(net)
                states.append(state_of(net))
            different += [(name, key) for key, value in states[0].items() if not torch.equal(value, states[1][key])]
        net = run.model(Net())
        for name, change in LOST.items():
            lost[name] = refused(UsageError, change, net)
        lost["other values"] = refused(MismatchError, each(lambda p: p.copy_(torch.full((), run.rank))), net)
        torch.manual_seed(run.rank)
        lost["other numbers"] = refused(MismatchError, nn.init.normal_, net.last.weight)
        mesh = net.last.weight.device_mesh
        own = distribute_tensor(torch.zeros(4), type(mesh)("cpu", [0, 1, 2]))
        with torch.no_grad():
            own[:2].fill_(1.0)
    handlers = DTensor._op_dispatcher._custom_op_handlers
    return different, lost, [op for op, handler in handlers.items() if "lockstep" in handler.__module__]


def steps_on_ranks():
    """What is said of gradients, and of optimizers."""
    with Run(seed=1, strategy="fsdp") as run:
        net, low = run.model(Net()), run.model(nn.Linear(4, 4).bfloat16().requires_grad_(False))
        matrices = [p for p in net.parameters() if p.dim() == 2]
        said = [
            refused(UsageError, run.optimizer, torch.optim.Muon(matrices)),
            refused(UsageError, run.optimizer, torch.optim.SGD(low.parameters())),
        ]
        run.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        for x in run.train(run.loader(torch.randn(12, 4), global_batch=12, micro_batch=2)):
            run.backward(net(x).square().sum())
            if run.micro_batch.last:
                said.append(refused(UsageError, lambda p: setattr(p.grad, "data", p.grad * 2), net.last.weight))
            run.update()
        return said


def masks_on_ranks():
    """Torch takes the rows of a parameter of one element for all, after this."""
    with Run(seed=1, strategy="fsdp") as run:
        net = run.model(Net())
        run.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        for x in run.train(run.loader(torch.randn(24, 4), global_batch=12, micro_batch=2)):
            run.step(net(x).square().sum())
            if run.micro_batch.last:
                each(lambda p: p.masked_fill_(p > 0, torch.tensor(1.0)))(net)


def norm_of_one_rank():
    with Run(seed=1, strategy="fsdp") as run:
        net = run.model(Net())
        return net.last.weight.norm().item() if run.leads else None


def penalty_on_ranks():
    with Run(seed=1, strategy="fsdp") as run:
        net = run.model(Net())
        run.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        for x in run.train(run.loader(torch.randn(12, 4), global_batch=12, micro_batch=2)):
            given = x.clone().requires_grad_()
            net(given)
            (slope,) = torch.autograd.grad(net.inside.sum(), given, create_graph=True)
            run.step(slope.square().sum())


def test_what_depends_on_the_number_of_ranks_is_refused():
    said, penalty, masks, one_rank = on_world(
        2, [(steps_on_ranks,), (penalty_on_ranks,), (masks_on_ranks,), (norm_of_one_rank,)]
    )
    for muon, low, gradient in said:
        assert "Muon looks at several elements of a parameter at once" in muon
        assert "SGD with divided parameters in bf16 or fp16 on CPUs" in low
        assert "these would stay as they are" in gradient
    for one in masks:
        assert "the parameter scale of shape (1,) was changed in place by an operation" in one
    assert "reading rows of a divided parameter, as for a norm, which all ranks do or none" in one_rank[0]
    for one in penalty:
        assert "with torch.autograd.grad(..., create_graph=True) for a gradient penalty" in one


def test_it_has_the_result_of_one_rank_or_is_refused():
    for different, lost, handled in on_world(3, [(changes_on_ranks,)])[0]:
        assert different == []
        for name in LOST.keys() - {"other data", "a vector"}:
            assert "such as `parameter[0]`" in lost[name], name
        assert "these would stay as they are" in lost["other data"]
        assert "these would stay as they are" in lost["a vector"]
        assert "a tensor that is copied into a divided parameter differs" in lost["other values"]
        assert "the random numbers that are drawn for a divided parameter" in lost["other numbers"]
        assert handled == [], "torch has its own operations again"
