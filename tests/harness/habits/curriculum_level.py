"""data_set.level rises where the accuracy of an epoch is high enough; it changes few samples only."""

KILL = 8

from kit import *


class Levels(Dataset):
    def __init__(s):
        s.x, s.y = data(48)
        s.level = 0

    def __len__(s):
        return 48

    def __getitem__(s, i):
        x = s.x[i]
        if i % 16 == 5:
            x = x + 0.2 * s.level
        return x, s.y[i]


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    d = Levels()
    b = run.loader(d, global_batch=16, micro_batch=4, shuffle=False, order=None)
    for e in run.epochs(6):
        for x, y in run.train(b):
            out = m(x)
            run.measure(acc=out.argmax(1) == y)
            run.step(F.cross_entropy(out, y))
        if run.metrics["acc"] > 0.2:
            d.level += 1
    done(run, m)


go(main)
