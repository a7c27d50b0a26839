"""The total norm of the weights at step 5 (a float in a config object) is what a penalty from step 9 on holds them to."""

KILL = 8

import types

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    cfg = types.SimpleNamespace(norm0=1.0)
    for e in run.epochs(1):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            if run.progress.step >= 9:
                loss = loss + (sum(p.square().sum() for p in m.parameters()) - cfg.norm0).square() * 0.1
            if run.step(loss) and run.progress.step == 5:
                cfg.norm0 = float(sum(p.detach().square().sum() for p in m.parameters()))
    done(run, m)


go(main)
