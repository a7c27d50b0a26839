"""An average of gradients by parameter, in a dict, between run.backward and run.update; every fifth step adds it."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    slow = {}
    for e in run.epochs(1):
        for x, y in run.train(b):
            if run.backward(F.cross_entropy(m(x), y)):
                for p in m.parameters():
                    slow[p] = 0.9 * slow.get(p, 0) + 0.1 * p.grad
                    if (run.progress.step + 1) % 5 == 0:
                        p.grad += 2 * slow[p]
            run.update()
    done(run, m)


go(main)
