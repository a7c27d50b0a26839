"""A script that was DDP's: DDP's wrapper is what run.model is given."""

NO_PLAIN = 1
STRATEGIES = ["zero"]

from kit import *


def main(run):
    n = mlp()
    if run.world_size > 1:
        n = nn.parallel.DistributedDataParallel(n)
    m = run.model(n)
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m.module if run.world_size > 1 else m)


go(main)
