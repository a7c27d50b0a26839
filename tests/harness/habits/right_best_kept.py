"""Right: the best weights and their score are kept, and loaded again after each worse epoch with a lower lr."""

KILL = 11

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, lr=0.5))
    run.keep(best=float("inf"), weights={})
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    v = run.loader(data(48), global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(4):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        for x, y in run.evaluate(v):
            run.measure(val=F.cross_entropy(m(x), y, reduction="none"))
        if run.metrics["val"] < run.kept.best:
            run.kept.best = run.metrics["val"]
            run.kept.weights = {k: t.clone() for k, t in m.state_dict().items()}
        else:
            m.load_state_dict(run.kept.weights)
            for g in o.param_groups:
                g["lr"] *= 0.5
    done(run, m)


go(main)
