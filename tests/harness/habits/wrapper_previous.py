"""`for x, y in mixed(run.train(b))`: a generator that mixes a batch with the one before, once 20 have passed."""

KILL = 8

from kit import *


def mixed(batches, start):
    previous = None
    for k, (x, y) in enumerate(batches):
        if k > start and previous is not None and len(previous) == len(x):
            yield 0.8 * x + 0.2 * previous, y
        else:
            yield x, y
        previous = x


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in mixed(run.train(b), 20):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
