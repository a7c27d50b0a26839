"""Strength of an augmentation in a class attribute (Jitter.strength = ...), set at each epoch's top; two loader processes."""

from kit import *


class Jitter:
    strength = 0.0

    def __call__(s, x):
        return x + s.strength * torch.randn_like(x)


class Images(Dataset):
    def __init__(s):
        s.x, s.y = data(64)
        s.transform = Jitter()

    def __len__(s):
        return 64

    def __getitem__(s, i):
        return s.transform(s.x[i]), int(s.y[i])


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(Images(), global_batch=16, micro_batch=4, workers=2)
    for e in run.epochs(3):
        Jitter.strength = 0.3 * e
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
