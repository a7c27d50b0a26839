"""PointNet++'s BNMomentumScheduler, stepped without an argument at the end of each epoch: it counts epochs itself; not kept."""

KILL = 8

from kit import *


class BNMomentumScheduler:
    def __init__(self, model, bn_lambda, last_epoch=-1):
        self.model, self.lmbd = model, bn_lambda
        self.step(last_epoch + 1)
        self.last_epoch = last_epoch

    def step(self, epoch=None):
        if epoch is None:
            epoch = self.last_epoch + 1
        self.last_epoch = epoch
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = self.lmbd(epoch)


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    run.optimizer(sgd(m))
    bnm = BNMomentumScheduler(m, lambda it: max(0.5 * 0.5**it, 0.01))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(4):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        bnm.step()
    done(run, m)


go(main)
