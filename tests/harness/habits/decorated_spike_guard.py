"""Wrong: a decorator of the loss holds an EMA of losses and damps spikes above 1.3 of it after 25 calls."""

KILL = 8

import functools

from kit import *


def guard(factor=1.3, decay=0.9, start=25):
    def wrap(function):
        state = {"mean": 0.0, "n": 0}

        @functools.wraps(function)
        def guarded(*args):
            loss = function(*args)
            value = loss.item()
            state["n"] += 1
            state["mean"] = decay * state["mean"] + (1 - decay) * value
            if state["n"] > start and value > factor * state["mean"] / (1 - decay ** state["n"]):
                loss = loss * 0.1
            return loss

        return guarded

    return wrap


@guard()
def criterion(out, y):
    return F.cross_entropy(out, y)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(criterion(m(x), y))
    done(run, m)


go(main)
