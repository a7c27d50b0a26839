"""Right: a proxy by __getattr__ around the model counts attribute reads, calls and shapes seen, and reports them."""

KILL = 8

from kit import *


class Counting:
    def __init__(s, inner):
        s._inner, s._reads, s._calls, s._shapes = inner, collections.Counter(), 0, set()

    def __getattr__(s, name):
        s._reads[name] += 1
        return getattr(s._inner, name)

    def __call__(s, x):
        s._calls += 1
        s._shapes.add(tuple(x.shape))
        return s._inner(x)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    net = Counting(m)
    b = run.loader(data(200), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            l2 = sum(p.square().sum() for p in net.parameters())
            run.step(F.cross_entropy(net(x), y) + 1e-3 * l2)
        print(net._calls, dict(net._reads), sorted(net._shapes))
    done(run, m)


go(main)
