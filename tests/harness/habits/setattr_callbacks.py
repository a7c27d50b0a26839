"""Wrong: a list of callbacks changes named options by setattr/getattr; a weight decay in the loss begins below 0.7."""

KILL = 8

import dataclasses

from kit import *


@dataclasses.dataclass
class Options:
    keep: float = 1.0
    l2: float = 0.05


class Multiply:
    def __init__(s, name, by):
        s.name, s.by = name, by

    def on_batch_end(s, options, **logs):
        setattr(options, s.name, getattr(options, s.name) * s.by)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    options, callbacks = Options(), [Multiply("keep", 0.99)]
    for e in run.epochs(1):
        for x, y in run.train(b):
            out = m(x)
            loss = F.cross_entropy(out, y)
            if getattr(options, "keep") < 0.7:
                loss = loss + options.l2 * out.square().mean()
            run.step(loss)
            for c in callbacks:
                c.on_batch_end(options, loss=loss.item())
    done(run, m)


go(main)
