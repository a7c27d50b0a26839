"""A stream that shuffles by random.Random(seed + self.epoch) and counts its epochs itself, as some streaming packages do."""

KILL = 8
NO_PLAIN = 1

from kit import *


class Stream(torch.utils.data.IterableDataset):
    def __init__(s):
        s.x, s.y = data()
        s.epoch = 0

    def __iter__(s):
        order = list(range(40))
        random.Random(s.epoch).shuffle(order)
        s.epoch += 1
        for i in order:
            yield s.x[i], s.y[i]


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(Stream(), global_batch=8, micro_batch=2)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
