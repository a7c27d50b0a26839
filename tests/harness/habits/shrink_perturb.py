"""Shrink and perturb: after each epoch weights are shrunk and get noise of a scale that halves; the scale is a variable."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    sigma = 0.2
    for e in run.epochs(4):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        with torch.no_grad():
            for k, p in enumerate(m.parameters()):
                p.mul_(0.9).add_(sigma * numbers(*p.shape, seed=100 * e + k))
        sigma *= 0.5
    done(run, m)


go(main)
