"""Wrong: globals()["margin"] grows in each body through a helper, up to a start at 0.3 where it enters the loss."""

KILL = 8

from kit import *

margin = 0.0


def grow(name, by):
    globals()[name] = globals()[name] + by


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            grow("margin", 0.01)
            out = m(x)
            run.step(F.cross_entropy(out - max(0.0, globals()["margin"] - 0.3) * F.one_hot(y, 3), y))
    done(run, m)


go(main)
