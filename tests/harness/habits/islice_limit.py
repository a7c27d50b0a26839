"""limit_train_batches: itertools.islice(run.train(b), 8), where a step has 4 micro-batches."""

WORLDS = (1, 2, 4)

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in itertools.islice(run.train(b), 8):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
