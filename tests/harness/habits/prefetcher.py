"""NVIDIA's data prefetcher around run.train: a class that holds the next batch while the body trains."""

from kit import *


class Prefetcher:
    def __init__(s, batches):
        s.it = iter(batches)
        s.preload()

    def preload(s):
        s.batch = next(s.it, None)

    def next(s):
        batch = s.batch
        s.preload()
        return batch


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        fetch = Prefetcher(run.train(b))
        batch = fetch.next()
        while batch is not None:
            x, y = batch
            run.step(F.cross_entropy(m(x), y))
            batch = fetch.next()
    done(run, m)


go(main)
