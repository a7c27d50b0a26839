"""Wrong after a resume: the data set's noise level rises when the accuracy of an epoch is above 0.3; from 3 on it acts."""

KILL = 11

from kit import *


class Noisy(Dataset):
    def __init__(s):
        s.x, s.y = data(96)
        s.level = 0

    def __len__(s):
        return 96

    def harder(s):
        s.level += 1

    def __getitem__(s, i):
        x = s.x[i]
        if s.level > 2:
            x = x + 0.2 * (s.level - 2) * torch.randn(6)
        return x, s.y[i]


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    d = Noisy()
    b = run.loader(d, global_batch=16, micro_batch=4)
    for e in run.epochs(5):
        for x, y in run.train(b):
            out = m(x)
            run.measure(acc=out.argmax(1) == y)
            run.step(F.cross_entropy(out, y))
        if run.metrics["acc"] > 0.2:
            d.harder()
    done(run, m)


go(main)
