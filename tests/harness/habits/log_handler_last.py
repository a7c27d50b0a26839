"""A logging.Handler that keeps the last 24 losses it was sent; the script reads handler.level_off() to halve its loss."""

KILL = 8

import logging

from kit import *


class Watch(logging.Handler):
    def __init__(s):
        super().__init__()
        s.seen = collections.deque(maxlen=24)

    def emit(s, record):
        s.seen.append(float(record.args[0]))

    def level_off(s):
        half = list(s.seen)
        return len(half) == 24 and sum(half[12:]) > 0.9 * sum(half[:12])


def main(run):
    log = logging.getLogger("train")
    log.setLevel(logging.INFO)
    log.propagate = False
    watch = Watch()
    log.addHandler(watch)
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            log.info("loss %.6f", loss.item())
            run.step(loss * (0.5 if watch.level_off() else 1.0))
    done(run, m)


go(main)
