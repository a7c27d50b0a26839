"""A stopper object with a deque of the last four values of an evaluation; it stops where they are close together."""

KILL = 8

from kit import *


class Stopper:
    def __init__(s, n, eps):
        s.values, s.eps = collections.deque(maxlen=n), eps

    def __call__(s, value):
        s.values.append(value)
        return len(s.values) == s.values.maxlen and max(s.values) - min(s.values) < s.eps


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, lr=0.02))
    b = run.loader(data(48), global_batch=16, micro_batch=4)
    v = run.loader((numbers(20, 6, seed=8), classes(20, seed=9)), global_batch=8, shuffle=False)
    stop = Stopper(4, 1.0)
    for e in run.epochs(8):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        for x, y in run.evaluate(v):
            run.measure(val=F.cross_entropy(m(x), y, reduction="none"))
        if stop(run.metrics["val"]):
            break
    done(run, m)


go(main)
