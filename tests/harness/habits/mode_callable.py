"""A variable holds the function; another is put there after 26 calls (no condition on losses)."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)

    def early(x, y):
        return F.cross_entropy(m(x), y)

    def late(x, y):
        return F.cross_entropy(m(x), y, label_smoothing=0.3)

    compute, n = early, 0
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(compute(x, y))
            n += 1
            if n == 26:
                compute = late
    done(run, m)


go(main)
