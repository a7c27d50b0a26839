"""A curriculum in a data set whose level the script raises between two parts of an epoch, of `run.steps(every=...)`."""

KILL = 8
NO_PLAIN = 1

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
    for step in run.steps(12, every=2):
        ds.level = 0.05 * step
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
