"""A script that was DDP's: the model is wrapped in DistributedDataParallel after run.model."""

NO_PLAIN = 1
STRATEGIES = ["zero"]

from kit import *


def main(run):
    n = run.model(mlp())
    o = run.optimizer(sgd(n))
    m = n
    if run.world_size > 1:
        m = nn.parallel.DistributedDataParallel(n)
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, n)


go(main)
