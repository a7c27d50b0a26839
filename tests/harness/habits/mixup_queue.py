"""Mixup with the batch of five batches ago, from a deque of (x, y)."""

KILL = 8

from kit import *


class CrossBatchMixup:
    def __init__(s, depth=9):
        s.past = collections.deque(maxlen=depth)

    def __call__(s, x, y):
        y = F.one_hot(y, 3).float()
        mixed = (x, y)
        if len(s.past) == s.past.maxlen:
            px, py = s.past.popleft()
            mixed = (0.8 * x + 0.2 * px, 0.8 * y + 0.2 * py)
        s.past.append((x, y))
        return mixed


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    mix = CrossBatchMixup()
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for batch in run.train(b):
            x, y = mix(*batch)
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
