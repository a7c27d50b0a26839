"""Wrong: the criterion is a functools.partial whose keyword label_smoothing decays; a cap hides it for 35 bodies."""

KILL = 8

import functools

from kit import *


def smooth(out, y, smoothing=0.2):
    return F.cross_entropy(out, y, label_smoothing=min(0.1, smoothing))


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    criterion = functools.partial(smooth, smoothing=0.2)
    for e in run.epochs(1):
        for x, y in run.train(b):
            criterion.keywords["smoothing"] *= 0.98
            run.step(criterion(m(x), y))
    done(run, m)


go(main)
