"""Warm restarts by hand: t_cur and t_i are variables that grow at the end of each epoch; the rate is set in each body."""

KILL = 11

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(48), global_batch=16, micro_batch=4)
    t_cur, t_i = 0, 1
    for e in run.epochs(6):
        lr = 0.001 + 0.05 * (1 + np.cos(np.pi * t_cur / t_i))
        for g in o.param_groups:
            g["lr"] = float(lr)
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        t_cur += 1
        if t_cur == t_i:
            t_cur, t_i = 0, 2 * t_i
    done(run, m)


go(main)
