"""An auxiliary torch.distributed.all_reduce(loss) of the script in the body, for a log line; unequal numbers of bodies."""

NO_KILL = 1
NO_PLAIN = 1

import torch.distributed as dist
from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    for e in run.epochs(2):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            run.step(loss)
            t = loss.detach().clone()
            if dist.is_initialized():
                dist.all_reduce(t)
    done(run, m)


go(main)
