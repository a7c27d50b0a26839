"""Momentum is thrown away at a warm restart: optimizer.state.clear() at the beginning of an epoch."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "parameter-server@3"]

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(4):
        if e == 2:
            o.state = collections.defaultdict(dict)
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
