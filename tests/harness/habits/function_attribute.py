"""augment.calls += 1 in the function; it jitters more, once it was called 20 times."""

KILL = 8

from kit import *


def augment(x):
    augment.calls += 1
    return x + (0.3 if augment.calls > 20 else 0.1) * torch.randn_like(x)


augment.calls = 0


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(augment(x)), y))
    done(run, m)


go(main)
