"""Right: a ContextVar is set for the forward pass by a context manager and reset in the same body."""

KILL = 8

import contextvars

from kit import *

scale = contextvars.ContextVar("scale", default=1.0)


@contextlib.contextmanager
def scaled(by):
    token = scale.set(scale.get() * by)
    try:
        yield
    finally:
        scale.reset(token)


class Net(nn.Sequential):
    def forward(s, x):
        return super().forward(x) * scale.get()


def main(run):
    m = run.model(Net(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            with scaled(2.0):
                a = m(x)
            run.step(F.cross_entropy(a, y) + 0.1 * F.cross_entropy(m(-x), y))
    done(run, m)


go(main)
