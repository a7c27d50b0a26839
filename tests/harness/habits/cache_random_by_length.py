"""@functools.cache of a random dropout mask by length; some lengths come late only."""

KILL = 8

import functools

from kit import *


@functools.cache
def keep_mask(length):
    return (torch.rand(length) > 0.3).float()


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    x, y = data(192)
    b = run.loader((x, y), global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(1):
        for x, y in run.train(b):
            n = 6 if run.progress.step < 5 else 3 + int(y.sum()) % 4
            run.step(F.cross_entropy(m(torch.cat([x[:, :n] * keep_mask(n), x[:, n:]], 1)), y))
    done(run, m)


go(main)
