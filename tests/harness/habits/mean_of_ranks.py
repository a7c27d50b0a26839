"""An average of run.mean(kl) of the last micro-batch of each rank scales the loss after 6 steps."""

NO_KILL = 1

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    coef, kl_avg = 0.1, 0.0
    for e in run.epochs(1):
        for x, y in run.train(b):
            out = m(x)
            kl = (out.softmax(1) * out.log_softmax(1)).sum(1).mean()
            if run.step(F.cross_entropy(out, y) + coef * kl):
                kl_avg = 0.9 * kl_avg + 0.1 * float(run.mean(kl.item()))
                if run.progress.step > 6:
                    coef = 0.1 - 0.2 * kl_avg
    done(run, m)


go(main)
