"""A loss object is made in each body; its metaclass numbers the instances, and from the 25th on the loss is a focal one.

State: Numbered.made of the class, changed by the metaclass's __call__. Shows from the 25th body."""

KILL = 8

from kit import *


class Numbered(type):
    made = 0

    def __call__(cls, *args, **kw):
        Numbered.made += 1
        one = super().__call__(*args, **kw)
        one.number = Numbered.made
        return one


class Loss(metaclass=Numbered):
    def __init__(s, out, y):
        s.out, s.y = out, y

    def value(s):
        ce = F.cross_entropy(s.out, s.y, reduction="none")
        gamma = 2.0 if s.number >= 25 else 0.0
        return ((1 - (-ce).exp()) ** gamma * ce).mean()


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(Loss(m(x), y).value())
    done(run, m)


go(main)
