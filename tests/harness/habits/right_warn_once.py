"""Right: a model that warns once (self.warned)."""

KILL = 8

import warnings

from kit import *


class Model(nn.Module):
    def __init__(s):
        super().__init__()
        s.net, s.warned = mlp(), False

    def forward(s, x):
        if not s.warned and x.abs().max() > 1.5:
            warnings.warn("large inputs")
            s.warned = True
        return s.net(x)


def main(run):
    m = run.model(Model())
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
