"""A policy object with np.random.default_rng(0), asked only where a batch holds one class at most once."""

KILL = 8

from kit import *


class Policy:
    def __init__(s):
        s.rng = np.random.default_rng(0)

    def __call__(s, x):
        return x * float(s.rng.uniform(0.5, 1.5))


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    x, y = data(192)
    y[:64] = torch.arange(64) % 3
    b = run.loader((x, y), global_batch=16, micro_batch=4, shuffle=False)
    policy = Policy()
    for e in run.epochs(1):
        for x, y in run.train(b):
            if torch.bincount(y, minlength=3).min() == 0:
                x = policy(x)
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
