"""Right: decorators that count calls (f.calls += 1) and time them; only printed."""

KILL = 8

import functools

from kit import *


def counted(f):
    @functools.wraps(f)
    def call(*args, **kw):
        call.calls += 1
        began = time.perf_counter()
        try:
            return f(*args, **kw)
        finally:
            call.seconds += time.perf_counter() - began

    call.calls, call.seconds = 0, 0.0
    return call


@counted
def features(m, x):
    return m[1](m[0](x))


@counted
def loss_of(m, h, y):
    return F.cross_entropy(m[2](h), y)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(loss_of(m, features(m, x), y))
    print(features.calls, loss_of.calls, loss_of.seconds)
    done(run, m)


go(main)
