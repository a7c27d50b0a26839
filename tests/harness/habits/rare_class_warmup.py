"""Wrong: warm-up counted in classes: the regulariser begins when the set of classes seen is complete (one is rare)."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp(k=5))
    o = run.optimizer(sgd(m))
    x, y = data(384, k=4)
    y[numbers(384, seed=9).argsort()[:3]] = 4
    b = run.loader((x, y), global_batch=16, micro_batch=4)
    seen = set()
    for e in run.epochs(1):
        for x, y in run.train(b):
            seen.update(y.tolist())
            out = m(x)
            loss = F.cross_entropy(out, y)
            if len(seen) == 5:
                loss = loss + 0.05 * out.square().mean()
            run.step(loss)
    done(run, m)


go(main)
