"""Batches are counted in the first epoch, then a cosine over that number sets the rate once a step."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    batches = 0
    for e in run.epochs(3):
        for x, y in run.train(b):
            done_step = run.step(F.cross_entropy(m(x), y))
            if e == 0:
                batches += 1
            elif done_step:
                for g in o.param_groups:
                    g["lr"] = 0.1 * (0.5 + 0.5 * np.cos(np.pi * min(1.0, (run.progress.step - 4) / batches)))
    done(run, m)


go(main)
