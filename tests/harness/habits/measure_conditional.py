"""run.measure only where there is something to measure (a mask, a class); some ranks measure nothing at all."""

NO_KILL = 1

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    v = run.loader(data(20), global_batch=8, micro_batch=4, shuffle=False)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        for i, (x, y) in enumerate(run.evaluate(v)):
            k = y == 2
            if k.sum() > 1:
                run.measure(recall=m(x)[k].argmax(1) == 2)
    done(run, m)


go(main)
