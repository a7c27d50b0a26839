"""A criterion changes its own __class__ from Warm to Hard when it has seen 120 samples.

State: criterion.n and criterion.__class__. Shows after 120 samples of a rank."""

KILL = 11

from kit import *


class Warm:
    n = 0

    def __call__(s, out, y):
        s.n += len(y)
        if s.n >= 120:
            s.__class__ = Hard
        return F.cross_entropy(out, y)


class Hard(Warm):
    def __call__(s, out, y):
        return F.cross_entropy(out, y, reduction="none").topk(2).values.mean()


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(320), global_batch=16, micro_batch=4)
    criterion = Warm()
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(criterion(m(x), y))
    done(run, m)


go(main)
