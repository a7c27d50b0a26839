"""A data set that counts what it has given, and adds label noise once it has given 100 samples."""

KILL = 8

from kit import *


class Noisy(Dataset):
    def __init__(s):
        s.x, s.y = data(192)
        s.given = 0

    def __len__(s):
        return 192

    def __getitem__(s, i):
        s.given += 1
        y = s.y[i]
        if s.given > 100 and random.random() < 0.3:
            y = torch.tensor(random.randrange(3))
        return s.x[i], y


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(Noisy(), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
