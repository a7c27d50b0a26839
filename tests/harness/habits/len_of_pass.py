"""A schedule over len(run.train(batches)) * epochs steps: the number of this rank's micro-batches."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    n = len(run.train(b)) if not PLAIN else 10
    s = run.scheduler(torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=n * 3))
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
