"""cfg.temperature is a property that anneals itself each time it is read; constant for the first 16 reads."""

KILL = 8

from kit import *


class Config:
    __slots__ = ("_reads",)

    def __init__(s):
        s._reads = 0

    @property
    def temperature(s):
        s._reads += 1
        return 1.0 if s._reads <= 16 else max(0.5, 1.0 - 0.02 * (s._reads - 16))


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    cfg = Config()
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x) / cfg.temperature, y))
    done(run, m)


go(main)
