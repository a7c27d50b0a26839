"""Wrong: a descriptor anneals the configuration's dropout each time that it is read; the forward pass reads it late."""

KILL = 8

from kit import *


class Annealed:
    def __init__(s, start, rate, after):
        s.value, s.rate, s.left = start, rate, after

    def __get__(s, owner, kind=None):
        s.left -= 1
        if s.left < 0:
            s.value *= s.rate
        return s.value


class Config:
    drop = Annealed(0.5, 0.95, after=40)


def main(run):
    cfg = Config()
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(F.dropout(x, cfg.drop)), y))
    done(run, m)


go(main)
