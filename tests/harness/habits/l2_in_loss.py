"""A penalty on all parameters in the loss, outside of forward: sum(p.pow(2).sum() for p in model.parameters())."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "parameter-server@3"]

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y) + 0.01 * sum(p.pow(2).sum() for p in m.parameters()))
    done(run, m)


go(main)
