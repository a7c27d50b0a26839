"""RandAugment's magnitude, an attribute of the data set's transform, is raised by a callback where run.step returns True."""

KILL = 8

from kit import *


class RandAugment:
    def __init__(self, magnitude=1):
        self.magnitude = magnitude

    def __call__(self, x):
        return x + 0.1 * self.magnitude * torch.randn_like(x)


class Images(Dataset):
    def __init__(self, n, transform):
        self.x, self.y, self.transform = numbers(n, 6), classes(n), transform

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.transform(self.x[i]), self.y[i]


class RaiseMagnitude:
    def __init__(self, augment, every=2):
        self.augment, self.every = augment, every

    def on_step(self, step):
        self.augment.magnitude = 1 + step // self.every


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    augment = RandAugment()
    callbacks = [RaiseMagnitude(augment)]
    b = run.loader(Images(96, augment), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)):
                for callback in callbacks:
                    callback.on_step(run.progress.step)
    done(run, m)


go(main)
