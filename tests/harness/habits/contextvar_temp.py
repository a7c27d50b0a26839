"""Wrong: a temperature in a ContextVar, multiplied in each body by a helper; the loss reads it after it is below 0.75."""

KILL = 8

import contextvars

from kit import *

temperature = contextvars.ContextVar("temperature", default=1.0)


def anneal():
    temperature.set(temperature.get() * 0.99)


def criterion(out, y):
    t = temperature.get()
    return F.cross_entropy(out / (t if t < 0.75 else 1.0), y)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            anneal()
            run.step(criterion(m(x), y))
    done(run, m)


go(main)
