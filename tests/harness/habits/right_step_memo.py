"""Right: a schedule is memoised by step in a dict, and the value of the last body is shown only."""

KILL = 8

from kit import *


class Schedule:
    def __init__(s, total):
        s.total, s.known, s.shown = total, {}, None

    def __call__(s, step):
        if step not in s.known:
            s.known[step] = 0.1 * (1 - math_cos(step / s.total))
        if s.shown != s.known[step]:
            s.shown = s.known[step]
            print(f"weight {s.shown:.4f}")
        return s.known[step]


def math_cos(t):
    return float(np.cos(np.pi * t / 2))


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    weight = Schedule(24)
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            out = m(x)
            run.step(F.cross_entropy(out, y) + weight(run.progress.step) * out.square().mean())
    done(run, m)


go(main)
