"""The optimizer is swapped at epoch 2: Adam, then SGD; both registered, one step each."""

STRATEGIES = ["zero", "fsdp"]
NO_PLAIN = 1

from kit import *


def main(run):
    m = run.model(mlp())
    one, two = run.optimizer(adam(m)), run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(4):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y), optimizer=one if e < 2 else two)
    done(run, m)


go(main)
