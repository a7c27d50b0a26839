"""Right: callbacks registered by a metaclass and fired by getattr; they count, remember the best batch and print."""

KILL = 8

from kit import *


class Registered(type):
    known = []

    def __new__(mcs, name, bases, body):
        cls = super().__new__(mcs, name, bases, body)
        if bases:
            mcs.known.append(cls)
        return cls


class Callback(metaclass=Registered):
    def fire(s, event, **kw):
        getattr(s, event, lambda **kw: None)(**kw)


class Best(Callback):
    best, at = float("inf"), -1

    def batch_end(s, n, loss, **kw):
        if loss < s.best:
            s.best, s.at = loss, n

    def epoch_end(s, **kw):
        print("best batch", s.at, s.best)


class Progress(Callback):
    def __init__(s):
        s.samples, s.began = 0, time.monotonic()

    def batch_end(s, size, **kw):
        s.samples += size

    def epoch_end(s, e, **kw):
        print(e, s.samples, "samples", s.samples / (time.monotonic() - s.began), "per second")


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    callbacks = [cls() for cls in Registered.known]
    for e in run.epochs(2):
        for n, (x, y) in enumerate(run.train(b)):
            loss = F.cross_entropy(m(x), y)
            run.step(loss)
            for c in callbacks:
                c.fire("batch_end", n=n, loss=loss.item(), size=len(x))
        for c in callbacks:
            c.fire("epoch_end", e=e)
    done(run, m)


go(main)
