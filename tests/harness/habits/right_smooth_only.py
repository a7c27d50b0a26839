"""Right: an exponentially smoothed loss as a variable, only logged by logging.info."""

import logging

from kit import *


def main(run):
    log = logging.getLogger("habit")
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        smooth = None
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            run.step(loss)
            smooth = loss.item() if smooth is None else 0.9 * smooth + 0.1 * loss.item()
            log.info("epoch %d step %d loss %.4f", e, run.progress.step, smooth)
    done(run, m)


go(main)
