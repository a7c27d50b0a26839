"""Right: ContextDecorator timers with counts per section, and a summary at the end of each epoch."""

KILL = 8

from kit import *


class Section(contextlib.ContextDecorator):
    all = {}

    def __init__(s, name):
        s.name = name
        s.all.setdefault(name, [0, 0.0])

    def __enter__(s):
        s.t = time.perf_counter()
        return s

    def __exit__(s, *error):
        cell = s.all[s.name]
        cell[0] += 1
        cell[1] += time.perf_counter() - s.t


@Section("forward")
def forward(m, x, y):
    return F.cross_entropy(m(x), y)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            loss = forward(m, x, y)
            with Section("step"):
                run.step(loss)
        for name, (n, seconds) in Section.all.items():
            run.say(f"{name}: {1000 * seconds / max(1, n):.2f} ms x {n}")
    done(run, m)


go(main)
