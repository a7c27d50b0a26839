"""Weights changed once a step, where run.step returned True: decoupled decay, a row of zeros."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "pipeline", "parameter-server@3"]

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            if run.step(F.cross_entropy, x, y):
                with torch.no_grad():
                    for p in m.parameters():
                        p.mul_(0.99)
                    m[0].weight[0].zero_()
    done(run, m)


go(main)
