"""An optimizer of one's own: steps by the mean of the last three gradients, which are in a deque of the object."""

KILL = 8

from kit import *


class Averaged(torch.optim.Optimizer):
    def __init__(s, params, lr=0.1, window=3):
        super().__init__(params, {"lr": lr})
        s.past = collections.deque(maxlen=window)

    @torch.no_grad()
    def step(s, closure=None):
        ps = [p for g in s.param_groups for p in g["params"] if p.grad is not None]
        s.past.append([p.grad.clone() for p in ps])
        for i, p in enumerate(ps):
            p.add_(sum(g[i] for g in s.past) / len(s.past), alpha=-s.param_groups[0]["lr"])


def main(run):
    m = run.model(mlp())
    o = run.optimizer(Averaged(m.parameters()))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
