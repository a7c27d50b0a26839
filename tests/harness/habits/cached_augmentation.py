"""A data set that caches what it has prepared, the random crop included: self.cache[i] = augment(load(i))."""

from kit import *


class Cached(Dataset):
    def __init__(s):
        s.x, s.y = data()
        s.cache = {}

    def __len__(s):
        return 40

    def __getitem__(s, i):
        if i not in s.cache:
            s.cache[i] = s.x[i] + 0.5 * torch.randn(6)
        return s.cache[i], s.y[i]


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(Cached(), global_batch=16, micro_batch=2)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
