"""Lookahead by hand in the optimizer: slow weights in a list attribute, every 3 steps; not in its state."""

STRATEGIES = ["zero"]

from kit import *


class Lookahead(torch.optim.SGD):
    def __init__(s, ps, lr):
        super().__init__(ps, lr=lr, momentum=0.9)
        s.slow = [p.detach().clone() for g in s.param_groups for p in g["params"]]
        s.count = 0

    @torch.no_grad()
    def step(s, closure=None):
        super().step()
        s.count += 1
        if s.count % 3 == 0:
            for slow, p in zip(s.slow, (p for g in s.param_groups for p in g["params"])):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(Lookahead(m.parameters(), lr=0.1))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
