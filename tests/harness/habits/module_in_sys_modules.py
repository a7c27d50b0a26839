"""Settings live in a module made by types.ModuleType and put into sys.modules; a function in another scope counts there.

State: attributes of a module in sys.modules. Shows after 25 bodies."""

KILL = 8

import sys
import types

from kit import *

settings = types.ModuleType("kept_settings")
settings.seen, settings.gain = 0, 1.0
sys.modules["kept_settings"] = settings


def tick():
    import kept_settings as s

    s.seen += 1
    if s.seen > 25:
        s.gain = 1.0 + 0.01 * (s.seen - 25)


def gain():
    return sys.modules["kept_settings"].gain


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            tick()
            run.step(F.cross_entropy(gain() * m(x), y))
    done(run, m)


go(main)
