"""A curriculum in the data set: ds.level grows by 0.05 where run.step returns True, and __getitem__ adds so much noise."""

KILL = 8

from kit import *


class NoisyDataset(Dataset):
    def __init__(self, n):
        self.x, self.y, self.level = numbers(n, 6), classes(n), 0.0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + self.level * torch.randn(6), self.y[i]

    def harder(self):
        self.level = min(1.0, self.level + 0.05)


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    ds = NoisyDataset(96)
    b = run.loader(ds, global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)):
                ds.harder()
    done(run, m)


go(main)
