"""A penalty under a decorator @every(10), which calls the function in each tenth call and else gives 0."""

KILL = 8

import functools

from kit import *


def every(n):
    def decorate(f):
        calls = 0

        @functools.wraps(f)
        def inner(*args):
            nonlocal calls
            calls += 1
            return f(*args) if calls % n == 0 else 0.0

        return inner

    return decorate


@every(10)
def penalty(model):
    return 0.1 * sum(p.square().sum() for p in model.parameters())


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y) + penalty(m))
    done(run, m)


go(main)
