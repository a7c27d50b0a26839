"""A transform that is a closure over a list, strength[0] = ..., set at each epoch's top; two loader processes."""

from kit import *

SCALE = 1.0


class Images(Dataset):
    def __init__(s, transform):
        s.x, s.y = data(64)
        s.transform = transform

    def __len__(s):
        return 64

    def __getitem__(s, i):
        return SCALE * s.transform(s.x[i]), int(s.y[i])


def main(run):
    global SCALE  # noqa: PLW0603 - as scripts have it
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    strength = [0.0]
    b = run.loader(Images(lambda x: x + strength[0] * torch.randn(6)), global_batch=16, micro_batch=4, workers=2)
    for e in run.epochs(3):
        strength[0] = 0.3 * e
        SCALE = 1 - 0.1 * e
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
