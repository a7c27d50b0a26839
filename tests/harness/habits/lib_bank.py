"""A memory bank in a helper module (a global list), used once it is full."""

KILL = 8

from kit import *
from labs import bank


def main(run):
    m = run.model(mlp(k=4))
    o = run.optimizer(sgd(m))
    b = run.loader(data(192, k=4), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            out = m(x)
            loss = F.cross_entropy(out, y)
            if bank.is_full():
                loss = loss + 0.2 * bank.contrast(out)
            bank.push(out)
            run.step(loss)
    done(run, m)


go(main)
