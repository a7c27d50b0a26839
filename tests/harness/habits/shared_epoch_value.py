"""open_clip's SharedEpoch: a multiprocessing.Value that the data set reads in its two loader processes."""

import multiprocessing

from kit import *


class Images(Dataset):
    def __init__(s, epoch):
        s.x, s.y = data(64)
        s.epoch = epoch

    def __len__(s):
        return 64

    def __getitem__(s, i):
        return s.x[i] + 0.3 * s.epoch.value * torch.randn(6), int(s.y[i])


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    epoch = multiprocessing.Value("i", 0)
    b = run.loader(Images(epoch), global_batch=16, micro_batch=4, workers=2)
    for e in run.epochs(3):
        epoch.value = e
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
