"""drop = next(rates) once an epoch, of an iterator over a list whose first values are equal."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    rates = iter([0.0] * 4 + [0.2, 0.4, 0.6, 0.8])
    for e in run.epochs(6):
        drop = next(rates)
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(F.dropout(x, drop)), y))
    done(run, m)


go(main)
