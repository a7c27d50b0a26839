"""A wrapper patches m.forward on the instance: noise on the inputs at first; after 26 calls it puts the old forward back.

State: a count in the closure and the attribute forward of the model. Shows after 26 calls."""

KILL = 8

from kit import *


def warm(m, until=26):
    plain, n = m.forward, 0

    def forward(x):
        nonlocal n
        n += 1
        if n == until:
            m.forward = plain
        return plain(x + 0.1 * x.roll(1, 0))

    m.forward = forward


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)
    warm(m)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
