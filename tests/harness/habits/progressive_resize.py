"""Progressive resizing: dataset.size = ... by epoch, two loader processes; drop_last."""

from kit import *


class Ds(Dataset):
    def __init__(s):
        s.x, s.y = data(43)
        s.size = 2

    def __len__(s):
        return 43

    def __getitem__(s, i):
        return torch.cat([s.x[i][: s.size], torch.zeros(6 - s.size)]) + 0.1 * torch.randn(6), s.y[i]


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    ds = Ds()
    b = run.loader(ds, global_batch=16, micro_batch=4, drop_last=True, workers=2)
    for e in run.epochs(3):
        ds.size = 2 + 2 * e
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
