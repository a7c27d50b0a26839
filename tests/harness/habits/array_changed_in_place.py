"""Pseudo-labels written into a NumPy array of the data set between epochs, two loader processes."""

NO_KILL = 1

from kit import *


class Ds(Dataset):
    def __init__(s):
        s.x = data()[0].numpy()
        s.y = data()[1].numpy().copy()

    def __len__(s):
        return 40

    def __getitem__(s, i):
        return s.x[i], s.y[i]


def main(run):
    ds = Ds()
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(ds, global_batch=16, micro_batch=4, workers=2)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        ds.y[:] = (ds.y + 1) % 3
    done(run, m)


go(main)
