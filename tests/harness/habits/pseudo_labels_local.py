"""Label refurbishment: ds.y[index] = prediction in the body, for the samples of the micro-batch."""

from kit import *


class Ds(Dataset):
    def __init__(s):
        s.x, s.y = data()

    def __len__(s):
        return 40

    def __getitem__(s, i):
        return s.x[i], s.y[i], i


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    ds = Ds()
    b = run.loader(ds, global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y, i in run.train(b):
            out = m(x)
            p, k = out.softmax(1).max(1)
            ds.y[i] = torch.where(p > 0.6, k, y)
            run.step(F.cross_entropy(out, y))
    done(run, m)


go(main)
