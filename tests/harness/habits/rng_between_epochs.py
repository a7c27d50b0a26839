"""A NumPy generator with a seed picks a domain for each epoch; the last step of the epoch uses it. Not kept."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    rng = np.random.default_rng(3)
    shifts = numbers(8, 6, seed=9)
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(4):
        domain = rng.integers(8)
        for x, y in run.train(b):
            if run.progress.step % 4 == 3:
                x = x + shifts[domain]
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
