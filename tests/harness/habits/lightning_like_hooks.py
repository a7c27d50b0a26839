"""A callback called in the body counts its calls, and scales every third loss."""

from kit import *


class Callback:
    def __init__(s):
        s.calls = 0

    def on_batch(s, loss):
        s.calls += 1
        return loss * (0.5 if s.calls % 3 == 0 else 1)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    callbacks = [Callback()]
    for e in run.epochs(2):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            for c in callbacks:
                loss = c.on_batch(loss)
            run.step(loss)
    done(run, m)


go(main)
