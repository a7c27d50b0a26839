"""an SGD subclass whose step() calls a helper object that counts, and from 15 on shrinks; helper is not kept."""

KILL = 8

from kit import *


class Shrinker:
    n = 0

    @torch.no_grad()
    def __call__(s, params):
        s.n += 1
        if s.n >= 15:
            for p in params:
                p.mul_(0.999)


class Shrinking(torch.optim.SGD):
    helper = Shrinker()

    def step(self, closure=None):
        super().step(closure)
        self.helper(self.param_groups[0]["params"])


def main(run):
    m = run.model(mlp())
    o = run.optimizer(Shrinking(m.parameters(), lr=0.1))
    b = run.loader(data(320), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
