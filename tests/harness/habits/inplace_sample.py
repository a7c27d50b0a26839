"""A data set that changes its stored sample in place: x = self.x[i]; x += noise."""

from kit import *


class Bad(Dataset):
    def __init__(s):
        s.x, s.y = data()

    def __len__(s):
        return 40

    def __getitem__(s, i):
        x = s.x[i]
        x += 0.2 * torch.randn(6)
        return x, s.y[i]


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(Bad(), global_batch=16, micro_batch=2)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
