"""Hooks on the gradients of parameters see those of the step, as on one GPU, where a step is one micro-batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.run import Run
from worlds import on_world

X = torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (20,), generator=torch.Generator().manual_seed(2))
BATCH = 8  # the last step has 4 samples


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class Hooks:
    """Limits each number, adds to a history, and shrinks what ``.grad`` holds more and more."""

    def __init__(self, model, noise=0.0):
        self.norms, self.noise, self.shrunk = [], noise, 0
        self.handles = [p.register_hook(self.limit) for p in model.parameters()]
        self.handles += [p.register_hook(self.note) for p in model.parameters()]
        self.handles += [model[0].weight.register_post_accumulate_grad_hook(self.shrink)]

    def limit(self, gradient):
        return gradient.clamp(-0.03, 0.03) + self.noise * torch.randn_like(gradient)

    def note(self, gradient):
        self.norms.append(float(gradient.norm()))

    def shrink(self, parameter):
        self.shrunk += 1
        parameter.grad.div_(self.shrunk)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


def by_run(make, noise=0.0, strategy="ddp"):
    with Run(strategy=strategy) as run:
        own = net()
        hooks = Hooks(own, noise)
        model = run.model(own)
        run.optimizer(make(model))
        data = run.loader((X, Y), global_batch=BATCH, micro_batch=2, shuffle=False)
        for _ in run.epochs(2):
            for x, y in run.train(data):
                run.step(F.cross_entropy, x, y)
        hooks.handles[0].remove()
        left = [len(p._backward_hooks) for p in own.parameters()]
        return [p.detach().clone() for p in own.parameters()], hooks.norms, left


def by_hand(make):
    model = net()
    hooks, optimizer = Hooks(model), make(model)
    for _ in range(2):
        for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
    return [p.detach() for p in model.parameters()], hooks.norms


@pytest.mark.parametrize(("make", "strategy"), [(adam, "ddp"), (adam, "zero"), (lbfgs, "ddp")])
def test_a_hook_sees_the_gradient_of_the_step_as_in_plain_torch(make, strategy):
    wanted, norms = by_hand(make)
    (alone,), of_three = (on_world(world, [(by_run, make, 0.0, strategy)])[0] for world in (1, 3))
    for parameters, seen, left in (alone, *of_three):
        torch.testing.assert_close(parameters, wanted, rtol=1e-8, atol=1e-11)
        assert all(map(torch.equal, parameters, alone[0]))
        # Autograd calls the hooks of different parameters in the order in which their gradients are computed.
        assert sorted(seen) == pytest.approx(sorted(norms), rel=1e-8)
        assert left == [1, 2, 2, 2], "hooks are on the parameters again"


def test_what_hooks_draw_is_the_same_on_all_ranks_and_another_in_each_step():
    ((parameters, norms, _),) = on_world(1, [(by_run, adam, 0.01)])[0]
    for found, seen, _ in on_world(3, [(by_run, adam, 0.01)])[0]:
        assert all(map(torch.equal, found, parameters))
        assert seen == norms
    assert len(set(norms)) == len(norms)


@pytest.mark.parametrize(("world", "strategy"), [(2, "pipeline:stages=2"), (3, "parameter-server:servers=2")])
def test_where_no_rank_has_all_gradients_it_is_refused(world, strategy):
    said = on_world(world, [(by_run, adam, 0.0, strategy)])[0]
    assert any("a hook on the gradient of a parameter: under strategy" in str(error) for error in said), said
