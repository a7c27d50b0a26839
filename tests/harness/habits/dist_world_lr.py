"""lr = 0.05 * dist.get_world_size() if dist.is_initialized() else 0.05, in a helper with a warm-up."""

NO_KILL = 1

import torch.distributed as dist
from kit import *


def world():
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, lr=0.05 * world()))
    s = run.scheduler(torch.optim.lr_scheduler.LinearLR(o, 0.2, total_iters=4))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
