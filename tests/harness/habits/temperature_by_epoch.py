"""`temperature *= 0.8` at the end of each epoch: a number of the script."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    temperature = 2.0
    for e in run.epochs(4):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x) / temperature, y))
        temperature *= 0.8
    done(run, m)


go(main)
