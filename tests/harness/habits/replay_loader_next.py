"""Continual learning: from step 6 each body takes next(...) of a plain DataLoader over the old task's samples."""

KILL = 8

from kit import *


class Endless:
    def __init__(s, loader):
        s.loader, s.it = loader, iter(loader)

    def __call__(s):
        try:
            return next(s.it)
        except StopIteration:
            s.it = iter(s.loader)
            return next(s.it)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    old = Endless(DataLoader(TensorDataset(numbers(24, 6, seed=8), classes(24, seed=9)), batch_size=4))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            if run.progress.step >= 6:
                ox, oy = old()
                loss = loss + 0.5 * F.cross_entropy(m(ox), oy)
            run.step(loss)
    done(run, m)


go(main)
