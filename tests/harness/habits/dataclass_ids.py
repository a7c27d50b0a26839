"""Events as dataclasses with id: int = field(default_factory=itertools.count().__next__); an id from 30 on brings mixup.

State: the counter behind default_factory. Shows from the 31st body."""

KILL = 8

from dataclasses import dataclass, field

from kit import *


@dataclass
class Event:
    loss: float
    id: int = field(default_factory=itertools.count().__next__)

    @property
    def late(s):
        return s.id >= 30


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            event = Event(0.0)
            if event.late:
                x = 0.7 * x + 0.3 * x.flip(0)
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
