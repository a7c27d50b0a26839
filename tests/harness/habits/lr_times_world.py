"""The habit of DDP scripts: lr = 0.05 * world_size; loss / world_size."""

NO_PLAIN = 1

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, lr=0.05 * run.world_size))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
