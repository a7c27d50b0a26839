"""A step post hook counts, and from 15 on sets lr in param_groups; not kept; killed at 8."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(320), global_batch=16, micro_batch=4)
    n = 0

    def anneal(optimizer, args, kwargs):
        nonlocal n
        n += 1
        if n >= 15:
            optimizer.param_groups[0]["lr"] = 0.02

    o.register_step_post_hook(anneal)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
