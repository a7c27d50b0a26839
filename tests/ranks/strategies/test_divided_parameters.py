"""What a script does to divided parameters by itself, against the same done to a whole model by plain torch."""

import contextlib
import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from foreach_lists import steps_in_lists
from lockstep.errors import MismatchError, UsageError
from lockstep.launch_contract import RESUME
from lockstep.run import Run
from lockstep.strategies.not_whole.division_checks import check_fused_kernel
from worlds import on_world


class Net(nn.Module):
    """Rows that neither two nor three ranks divide."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 7), nn.ModuleList([nn.Linear(7, 7) for _ in range(2)])
        self.norm, self.last = nn.BatchNorm1d(7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.wide = nn.Parameter(torch.linspace(-1.5, 1.5, 133).view(19, 7))

    def forward(self, x):
        self.inside = self.blocks[0](self.first(x)).tanh()
        return self.last(self.norm(self.blocks[1](self.inside)) + self.wide.sum(0)) * self.scale


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


#: Of which torch's kernels for CPUs compute the last few elements of a tensor otherwise.
BY_ELEMENT = [
    torch.sigmoid,
    F.silu,
    torch.sinh,
    torch.atanh,
    F.gelu,
    F.softplus,
    torch.exp2,
    lambda p: p.abs().pow(1.5),
]


def functions_of_elements(net):
    wide = torch.zeros_like(net.wide)
    for function in BY_ELEMENT:
        wide.add_(function(net.wide).nan_to_num_())
    net.wide.data.copy_(wide)


def penalties(net):
    """Numbers that torch adds up of parts, unless it is told otherwise."""
    p = net.blocks[0].weight.detach()
    numbers = [F.mse_loss(p, p * 2), torch.dist(p, p.abs()), p.nansum(), p.logsumexp(0).sum(), p.softmax(0).max()]
    numbers += [p.argmax(), torch.bincount((p > 0).long().flatten()).max(), p.median(), p.trace(), (p > 0).sum()]
    net.blocks[0].weight.data.mul_(float(sum(number.item() for number in numbers)) / 64)


def orthogonalised(net):
    """By Newton and Schulz, with transposed matrices."""
    p = net.last.weight.data
    p.copy_(1.5 * p - 0.5 * (p @ p.T) @ p)
    p.copy_(torch.einsum("ij,kj,kl->il", p, p, p))
    p.sub_(p.T.contiguous().T.mean(0, keepdim=True) * p.T.norm(dim=0).unsqueeze(1))


def rows_moved(net):
    p = net.blocks[1].weight.data
    p.copy_(p.sort(0).values.roll(2, 0).flip(1))
    p.copy_(torch.cat([p[3:], p[:3]]).cumsum(1))


CHANGES = {
    "functions of elements": functions_of_elements,
    "sums of other kinds": penalties,
    "matrices": orthogonalised,
    "rows moved": rows_moved,
    "by masks": each(lambda p: p.__setitem__(p.abs() < 0.1, 0.0)),
    "a tensor by masks": each(lambda p: p.masked_fill_(p > 0, torch.tensor(1.0))),
    "by indices": each(lambda p: p.index_fill_(0, torch.tensor([0]), 1.0)),
    "at most a norm": lambda net: net.blocks[0].weight.data.renorm_(2, 0, 0.3),
    "sparse": lambda net: nn.init.sparse_(net.blocks[0].weight, 0.4),
    "in one": lambda net: net.wide.data.mul_(nn.utils.parameters_to_vector(net.parameters()).norm()),
    "apply": lambda net: net.apply(initialise),
    "modules' own": lambda net: net.apply(lambda m: getattr(m, "reset_parameters", lambda: None)()),
    "data": lambda net: net.last.weight.data.normal_(0, 0.02),
    "a matrix": orthogonal,
    "a generator": draws_of_a_generator,
    "integers": each(lambda p: p.random_(0, 10)),
    "exponential": each(lambda p: p.exponential_()),
    "masks": each(lambda p: p.mul_(torch.empty_like(p).bernoulli_(0.5))),
    "probabilities": each(lambda p: p.bernoulli_(p.sigmoid())),
    "draws with its values": each(lambda p: p.copy_(torch.bernoulli(p.sigmoid()) + torch.poisson(p.abs()))),
    "noise": each(lambda p: p.add_(torch.randn_like(p), alpha=0.1)),
    "dropout": each(lambda p: p.copy_(F.dropout(p, 0.3, training=True))),
    "another state": lambda net: net.load_state_dict(another().state_dict()),
    "of a module": lambda net: net.blocks[1].load_state_dict(another().blocks[0].state_dict()),
    "copied": each(lambda p: p.copy_(torch.randn(p.shape, dtype=torch.float64))),
    "broadcast": each(lambda p: p.copy_(torch.randn(()))),
    "a column": lambda net: net.last.weight.data[:, 1:].fill_(2.0),
    "a column by index": lambda net: net.last.weight.data.__setitem__((slice(None), 1), 3.0),
    "the norm": each(lambda p: p.mul_(p.norm().item())),
    "norms of a list": lambda net: net.wide.data.mul_(torch.stack(torch._foreach_norm([*net.parameters()])).max()),
    "in lists": lambda net: torch._foreach_mul_([p.data for p in net.parameters()], 0.5),
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
    "row by row": each(lambda p: [row.mul_(0.5) for row in p]),
    "all elements in one row": lambda net: net.first.weight.data.view(-1).mul_(2.0),
    "a list": lambda net: torch._foreach_mul_([net.last.weight.data[0]], 0.0),
    "in place": each(lambda p: p[1:].__iadd__(1.0)),
    "other data": lambda net: setattr(net.last.bias, "data", torch.ones(3)),
    "a vector": lambda net: nn.utils.vector_to_parameters(torch.ones(1000), net.parameters()),
}


def state_of(net):
    """All of it, and what is drawn next."""
    state = {n: t.full_tensor() if isinstance(t, DTensor) else t.clone() for n, t in net.state_dict().items()}
    return {**state, "drawn next": torch.rand(3)}


#: What would not be called, or with rows.
HOOKS = {
    "a hook": lambda net: net.last.weight.register_hook(torch.neg),
    "a hook after": lambda net: net.last.weight.register_post_accumulate_grad_hook(print),
}


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
        assert steps_in_lists([*net.parameters()]), "as those of one rank"
        for name, change in {**LOST, **HOOKS}.items():
            lost[name] = refused(UsageError, change, net)
        lost["other values"] = refused(MismatchError, each(lambda p: p.copy_(torch.full((), run.rank))), net)
        lost["other indices"] = refused(
            MismatchError, each(lambda p: p.index_fill_(0, torch.tensor([0] * (1 + run.rank)), 1.0)), net
        )
        lost["singular values"] = refused(UsageError, lambda net: torch.linalg.svdvals(net.last.weight), net)
        torch.manual_seed(run.rank)
        lost["other numbers"] = refused(MismatchError, nn.init.normal_, net.last.weight)
        mesh = net.last.weight.device_mesh
        own = distribute_tensor(torch.zeros(4), type(mesh)("cpu", [0, 1, 2]))
        with torch.no_grad():
            own[:2].fill_(1.0)
    handlers = DTensor._op_dispatcher._custom_op_handlers
    return different, lost, [op for op, handler in handlers.items() if "lockstep" in handler.__module__]


def is_divided(parameter):
    return isinstance(parameter, DTensor)


def steps_on_ranks():
    """What is said of gradients, and of optimizers."""
    with Run(seed=1, strategy="fsdp") as run:
        net = run.model(Net())
        matrices = [p for p in net.parameters() if p.dim() == 2]
        said = [
            refused(UsageError, run.optimizer, torch.optim.Muon(matrices)),
            refused(
                UsageError,
                lambda adam: check_fused_kernel(adam, is_divided),
                torch.optim.Adam(matrices, fused=True, weight_decay=0.1),
            ),
        ]
        # On an H100 these have the same bits for any rows.
        check_fused_kernel(torch.optim.AdamW(matrices, fused=True, weight_decay=0.1), is_divided)
        check_fused_kernel(torch.optim.Adam(matrices, fused=True), is_divided)
        check_fused_kernel(torch.optim.Adam(matrices, foreach=True, weight_decay=0.1), is_divided)
        run.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        for x in run.train(run.loader(torch.randn(12, 4), global_batch=12, micro_batch=2)):
            run.backward(net(x).square().sum())
            if run.micro_batch.last:
                said.append(refused(UsageError, lambda p: setattr(p.grad, "data", p.grad * 2), net.last.weight))
            run.update()
        return said


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
    said, penalty, one_rank = on_world(2, [(steps_on_ranks,), (penalty_on_ranks,), (norm_of_one_rank,)])
    for muon, fused, gradient in said:
        assert "Adam(fused=True, weight_decay=0.1): torch's kernel rounds the same numbers differently" in fused
        assert "Muon looks at several elements of a parameter at once" in muon
        assert "these would stay as they are" in gradient
    assert "reading rows of a divided parameter, as for a norm, which all ranks do or none" in one_rank[0]
    for one in penalty:
        assert "with torch.autograd.grad(..., create_graph=True) for a gradient penalty" in one


def test_it_has_the_result_of_one_rank_or_is_refused():
    for different, lost, handled in on_world(3, [(changes_on_ranks,)])[0]:
        assert different == []
        for name in HOOKS:
            assert "a hook for the gradient of a parameter of shape (3, 7)" in lost[name]
        assert "a tensor by which a divided parameter is changed differs" in lost["other indices"]
        assert "singular values or eigenvalues of a divided parameter" in lost["singular values"]
        for name in LOST.keys() - {"other data", "a vector"}:
            assert "such as `parameter[0]`" in lost[name], name
        assert "these would stay as they are" in lost["other data"]
        assert "these would stay as they are" in lost["a vector"]
        assert "a tensor that is copied into a divided parameter differs" in lost["other values"]
        assert "the random numbers that are drawn for a divided parameter" in lost["other numbers"]
        assert handled == [], "torch has its own operations again"


# ---- while it trains -------------------------------------------------------------------------------------------------


class MeansOfRows(torch.optim.Optimizer):
    """Keeps the means of rows and of columns, as Adafactor does."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state, step = self.state[p], p.grad
            if p.dim() == 2:
                for name, mean in (("rows", p.grad.square().mean(1)), ("columns", p.grad.square().mean(0))):
                    state.setdefault(name, torch.zeros_like(mean)).lerp_(mean, 0.1)
                step = p.grad / (state["rows"].unsqueeze(1) * state["columns"]).sqrt().add_(0.1)
            p.sub_(step, alpha=0.1)


def changed_after_looking(net, x):
    net.eval()
    net(x)  # gathers, and no backward pass follows that would drop what is gathered
    net.train()
    with torch.no_grad():
        net.last.weight.mul_(0.9)
        net.blocks[0].weight.mul_(0.9)


def changed_between(net, x):
    loss = net(x).square().sum()
    with torch.no_grad():
        net.last.bias.mul_(0.9)
    return loss


def by_hand(net, x):
    gradients = torch.autograd.grad(squares(net, x), list(net.parameters()))
    return sum((p * g).sum() for p, g in zip(net.parameters(), gradients, strict=True))


class Limited(Net):
    """With a weight that forward() limits."""

    def forward(self, x):
        self.last.weight.data.clamp_(max=9.0)
        return super().forward(x)


class BeyondLimits:
    """After so many steps, the weight leaves its limits."""

    def __init__(self, steps):
        self.left = steps

    def __call__(self, net, x):
        self.left -= 1
        if not self.left:
            with torch.no_grad():
                net.last.weight.copy_(torch.full_like(net.last.weight, 9.5))


def halved(net):
    return torch.func.functional_call(
        net, {n: p.detach() * 0.5 for n, p in net.named_parameters()}, (torch.ones(2, 4),)
    )


def tied(net):
    net.blocks[1].weight = net.blocks[0].weight


def squares(net, x):
    return net(x).square().sum()


def trains(strategy, optimizer, *, make=Net, after=None, loss=squares, directory=None, steps=2):
    """The trained model, whole on rank 0, or what was said."""
    with Run(seed=1, strategy=strategy, checkpoint=directory, save_every=directory and "1 step") as run:
        net = run.model(make())
        run.optimizer(optimizer(list(net.parameters())))
        data = torch.linspace(-1, 1, 96).view(24, 4).to(net.scale.dtype)
        batches = run.loader(data, global_batch=12, micro_batch=3)
        for _ in run.steps(steps):
            for x in run.train(batches):
                if run.step(loss(net, x)) and after is not None:
                    after(net, x)
        return run.state_dict(net)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def low():
    return Net().bfloat16()


#: With the bits of one rank.
TRAINED = {
    "means of rows": {"optimizer": MeansOfRows},
    "after a forward pass": {"optimizer": sgd, "after": changed_after_looking},
    "two bytes": {"optimizer": sgd, "make": low},
    "two bytes, AdamW": {"optimizer": torch.optim.AdamW, "make": low},
    "signs": {"optimizer": torch.optim.Rprop},
}
REFUSED = {
    "a penalty": ({"loss": lambda net, x: squares(net, x) + net.blocks[0].weight[0].sum()}, "depends on the parameter"),
    "the norm": ({"loss": lambda net, x: squares(net, x) + net.blocks[1].weight.norm()}, "depends on the parameter"),
    "others": ({"after": lambda net, x: halved(net)}, "scale: a parameter was replaced or tied"),
    "tied": ({"after": lambda net, x: tied(net)}, "blocks.1.weight: a parameter was replaced or tied"),
    "between": (
        {"loss": changed_between},
        "last.bias of shape (3,) was changed in the model's forward pass, or between it",
    ),
    "autograd.grad": ({"loss": by_hand, "strategy": "zero:stage=2"}, "outside of run.step(...) and run.backward(...)"),
    "limited late": (
        {"make": Limited, "after": BeyondLimits(5), "steps": 8},  # when no replays are free any more
        "last.weight of shape (3, 7) was changed in the model's forward pass",
    ),
    "frozen": ({"after": lambda net, x: net.last.requires_grad_(False)}, "and strategy fsdp divides a model as it is"),
}


def trainings(strategy):
    return {name: trains(strategy, **of_one) for name, of_one in TRAINED.items()}


def left_and_changed(strategy):
    """The trained model: after each loop that is left, blocks may still be gathered, and then it is changed."""
    with Run(seed=1, strategy=strategy) as run:
        net = run.model(Net())
        run.optimizer(sgd(list(net.parameters())))
        batches = run.loader(torch.linspace(-1, 1, 96).view(24, 4), global_batch=12, micro_batch=3)
        for epoch in run.epochs(5):
            for x in run.train(batches):
                loss = squares(net, x)
                if epoch == 1:
                    break
                run.step(loss)
            if epoch == 1:
                net(torch.ones(2, 4))
            with contextlib.suppress(ZeroDivisionError):
                for x in run.evaluate(batches) if epoch in (2, 3) else ():
                    net(x)
                    if epoch == 2:
                        break
                    raise ZeroDivisionError
            with torch.no_grad():
                net.last.weight.mul_(0.5)
        return run.state_dict(net)


def refusals():
    said = {}
    for name, (of_one, _) in REFUSED.items():
        with pytest.raises(UsageError) as caught:
            trains(**{"strategy": "fsdp", "optimizer": sgd} | of_one)
        said[name] = str(caught.value)
    return said


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_what_a_script_does_while_it_trains(tmp_path):
    go_on = partial(trains, optimizer=MeansOfRows, steps=4)
    alone, to_the_end, left = on_world(1, [(trainings, "none"), (go_on, "none"), (left_and_changed, "none")])
    begin = partial(trains, optimizer=MeansOfRows, directory=str(tmp_path))
    calls = [(trainings, "fsdp"), (refusals,), (begin, "fsdp"), (left_and_changed, "fsdp")]
    divided, refused_ones, _, left_divided = on_world(3, calls)
    assert same(left[0], left_divided[0])
    for name, state in alone[0].items():
        assert same(state, divided[0][name]), name
    for said in refused_ones:
        for name, (_, words) in REFUSED.items():
            assert words in said[name], name
    # What an optimizer keeps beside the rows is whole again on another number of ranks.
    (ended,) = on_world(2, [(partial(go_on, directory=str(tmp_path)), "zero:stage=2")], env={RESUME: "1"})
    assert same(to_the_end[0], ended[0])
