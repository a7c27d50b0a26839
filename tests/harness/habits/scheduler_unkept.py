"""A scheduler stepped by hand where run.step returned True; neither run.scheduler nor run.keep."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    s = torch.optim.lr_scheduler.CosineAnnealingLR(o, 9)
    for e in run.epochs(3):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)):
                s.step()
    done(run, m)


go(main)
