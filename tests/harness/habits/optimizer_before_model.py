"""The optimizer is made before run.model."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "parameter-server@3", "pipeline"]

from kit import *


def main(run):
    n = mlp()
    o = adam(n)
    m = run.model(n)
    o = run.optimizer(o)
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy, x, y)
    done(run, m)


go(main)
