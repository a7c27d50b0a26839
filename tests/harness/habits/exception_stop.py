"""Wrong after a resume: an object in a list counts epochs that are not better, and ends training by an exception."""

KILL = 11

from kit import *


class Stop(Exception):
    pass


class Patience:
    def __init__(s, n):
        s.n, s.marks = n, []

    def __call__(s, value):
        s.marks.append("+" if value > 0.9 else "-")
        if "".join(s.marks).endswith("-" * s.n):
            raise Stop


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, lr=0.01))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    hooks = [Patience(3)]
    try:
        for e in run.epochs(5):
            for x, y in run.train(b):
                out = m(x)
                run.measure(acc=out.argmax(1) == y)
                run.step(F.cross_entropy(out, y))
            for h in hooks:
                h(run.metrics["acc"])
    except Stop:
        pass
    done(run, m)


go(main)
