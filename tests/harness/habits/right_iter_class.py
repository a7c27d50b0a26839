"""Right: a timing wrapper class with __iter__ and __next__, and a len, which counts batches."""

from kit import *


class Timed:
    def __init__(s, batches):
        s.batches, s.count, s.waited = batches, 0, 0.0

    def __iter__(s):
        s.inner = iter(s.batches)
        return s

    def __next__(s):
        t0 = time.time()
        batch = next(s.inner)
        s.waited += time.time() - t0
        s.count += 1
        return batch


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        timed = Timed(run.train(b))
        for x, y in timed:
            run.step(F.cross_entropy(m(x), y))
        print(f"epoch {e}: {timed.count} batches, waited {timed.waited:.3f} s")
    done(run, m)


go(main)
