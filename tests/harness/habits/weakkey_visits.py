"""Wrong: visits are counted by module in a WeakKeyDictionary; a layer's noise ends after its first 40 forward passes."""

KILL = 8

import weakref

from kit import *

visits = weakref.WeakKeyDictionary()


class NoisyLinear(nn.Linear):
    def forward(s, x):
        visits[s] = visits.get(s, 0) + 1
        if visits[s] > 40:
            return super().forward(x)
        return super().forward(x + 0.1 * torch.randn_like(x))


def main(run):
    m = run.model(nn.Sequential(NoisyLinear(6, 8), nn.Tanh(), NoisyLinear(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
