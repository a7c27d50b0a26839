"""A registry of losses; the decorator counts calls of "main", and after 25 it puts another function into the registry.

State: LOSSES["main"] and the wrapper's count. Shows after 25 calls."""

KILL = 8

from kit import *

LOSSES = {}


def register(name, after=None, then=None):
    def wrap(f):
        left = itertools.count(1)

        def call(out, y):
            if after is not None and next(left) == after:
                LOSSES[name] = LOSSES[then]
            return f(out, y)

        LOSSES[name] = call
        return f

    return wrap


@register("smooth")
def smooth(out, y):
    return F.cross_entropy(out, y, label_smoothing=0.3)


@register("main", after=25, then="smooth")
def hard(out, y):
    return F.cross_entropy(out, y)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(LOSSES["main"](m(x), y))
    done(run, m)


go(main)
