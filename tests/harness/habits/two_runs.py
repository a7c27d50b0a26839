"""Distillation in one script: the first run trains a teacher, the second one learns from it."""

NO_KILL = 1
NO_PLAIN = 1

from kit import *

import lockstep


def main(run):
    t = run.model(mlp())
    o = run.optimizer(sgd(t))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(t(x), y))
    run.close()
    t.eval().requires_grad_(False)
    with lockstep.Run(seed=1) as two:
        m = two.model(mlp())
        o = two.optimizer(adam(m))
        b = two.loader(data(), global_batch=16, micro_batch=2)
        for e in two.epochs(2):
            for x, y in two.train(b):
                two.step(F.kl_div(m(x).log_softmax(1), t(x).softmax(1), reduction="batchmean"))
        done(two, m)


go(main)
