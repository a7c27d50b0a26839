"""Right: NumPy and Python generators made anew in each body, from (seed, step, micro-batch)."""

KILL = 8

from kit import *


def rng_of(run, tag):
    return np.random.default_rng([7, run.progress.step, run.micro_batch.index, tag])


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            lam = rng_of(run, 0).beta(0.4, 0.4)
            order = list(range(len(x)))
            random.Random(int(rng_of(run, 1).integers(2**30))).shuffle(order)
            y = F.one_hot(y, 3).float()
            x, y = lam * x + (1 - lam) * x[order], lam * y + (1 - lam) * y[order]
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
