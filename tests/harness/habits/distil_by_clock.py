"""Distillation: the weight of the teacher falls with each 0.4 s of training, by datetime."""

KILL = 8

import datetime

from kit import *


class Clock:
    def __init__(s):
        s.start = datetime.datetime.now()

    def ticks(s):
        return (datetime.datetime.now() - s.start) // datetime.timedelta(seconds=0.4)


def main(run):
    m = run.model(mlp())
    teacher = mlp().requires_grad_(False)
    run.keep(teacher=teacher)
    o = run.optimizer(sgd(m))
    clock = Clock()
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            time.sleep(0.04)
            alpha = 0.9 * 0.5 ** clock.ticks()
            out = m(x)
            kd = F.kl_div(out.log_softmax(1), teacher(x).softmax(1), reduction="batchmean")
            run.step(alpha * kd + (1 - alpha) * F.cross_entropy(out, y))
    done(run, m)


go(main)
