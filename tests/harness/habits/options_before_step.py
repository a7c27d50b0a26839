"""Learning rate and weight decay set before run.step from run.progress.step, at the top of each body."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "parameter-server@3", "hybrid@3", "pipeline"]

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            for g in o.param_groups:
                g["lr"] = 0.1 * 0.8**run.progress.step
                g["weight_decay"] = 0.01 * run.progress.step
            run.step(F.cross_entropy, x, y)
    done(run, m)


go(main)
