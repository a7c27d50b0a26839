"""Right: class weights by cached_property of the data set, a table of samples by lru_cache, a lazily made criterion."""

KILL = 8

import functools

from kit import *


class Points(Dataset):
    def __init__(s):
        s.x, s.y = data(96)
        s.decoded = {}

    def __len__(s):
        return 96

    @functools.cached_property
    def weights(s):
        return 96 / (3 * torch.bincount(s.y, minlength=3).float())

    def __getitem__(s, i):
        if i not in s.decoded:
            s.decoded[i] = s.x[i] / s.x[i].norm()
        return s.decoded[i] + 0.05 * torch.randn(6), s.y[i]


@functools.lru_cache(maxsize=1)
def criterion(d):
    w = d.weights
    return lambda out, y: (w[y] * F.cross_entropy(out, y, reduction="none")).mean()


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    d = Points()
    b = run.loader(d, global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(criterion(d)(m(x), y))
    done(run, m)


go(main)
