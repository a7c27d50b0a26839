"""Batches whose loss is above 1.2 medians of the past get weight 0.1; push = history.append; statistics.median."""

KILL = 8

import statistics

from kit import *


def spike_guard(warm=20, factor=1.05):
    history = []
    push = history.append

    def guard(loss):
        value = loss.item()
        limit = factor * statistics.median(history) if len(history) >= warm else float("inf")
        push(value)
        return loss if value <= limit else 0.1 * loss

    return guard


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    guard = spike_guard()
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(guard(F.cross_entropy(m(x), y)))
    done(run, m)


go(main)
