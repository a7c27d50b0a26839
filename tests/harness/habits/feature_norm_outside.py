"""Targets are whitened by a BatchNorm beside the model: it learns its statistics for 5 steps, then is eval()."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp(k=6))
    o = run.optimizer(sgd(m))
    whiten = nn.BatchNorm1d(6, affine=False)
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, _ in run.train(b):
            with torch.no_grad():
                whiten.train(run.progress.step < 5)
                target = whiten(x * 3 + 1)
            run.step(F.smooth_l1_loss(m(x), target))
    done(run, m)


go(main)
