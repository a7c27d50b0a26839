"""A module whose train(mode) is overridden and counts its calls: run.train and run.evaluate must call it as plain loops do."""

NO_KILL = 1

from kit import *


class Mode(nn.Linear):
    def __init__(s, i, o):
        super().__init__(i, o)
        s.calls = []

    def train(s, mode=True):
        s.calls.append(mode) if hasattr(s, "calls") else None
        return super().train(mode)


def main(run):
    m = run.model(nn.Sequential(Mode(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    v = run.loader(data(), global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(2):
        if PLAIN:
            m.train()
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        if PLAIN:
            m.eval()
        for x, y in run.evaluate(v):
            run.measure(acc=m(x).argmax(1) == y)
    done(run, m, balanced=m[0].calls.count(True) >= m[0].calls.count(False) > 0)


go(main)
