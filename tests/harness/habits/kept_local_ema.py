"""Wrong: a kept EMA of the loss, updated once a step, but from the rank's own last loss; it scales lr from step 14 on."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    run.keep(ema=1.0)
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            if run.step(loss):
                run.kept.ema = 0.9 * run.kept.ema + 0.1 * loss.item()
                if run.progress.step > 14:
                    o.param_groups[0]["lr"] = 0.1 * run.kept.ema
    done(run, m)


go(main)
