"""`if not torch.isfinite(loss): continue`, and one sample is NaN."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    x0, y0 = data()
    x0[5] = float("nan")
    b = run.loader((x0, y0), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            if not torch.isfinite(loss):
                continue
            run.step(loss)
    done(run, m)


go(main)
