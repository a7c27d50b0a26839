"""ScheduledOptim of the well-known Transformer code: n_steps in a wrapper beside the optimizer, once a step; not kept."""

KILL = 8

from kit import *


class ScheduledOptim:
    def __init__(s, optimizer, mul, d_model, warmup):
        s._optimizer, s.mul, s.d_model, s.n_warmup, s.n_steps = optimizer, mul, d_model, warmup, 0

    def update(s):
        s.n_steps += 1
        scale = s.d_model**-0.5 * min(s.n_steps**-0.5, s.n_steps * s.n_warmup**-1.5)
        for g in s._optimizer.param_groups:
            g["lr"] = s.mul * scale


def main(run):
    m = run.model(mlp())
    o = ScheduledOptim(run.optimizer(adam(m)), 0.05, 8, 5)
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)):
                o.update()
    done(run, m)


go(main)
