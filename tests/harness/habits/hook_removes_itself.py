"""A forward hook scales the features while warming up, and removes itself by its handle after 24 calls.

State: the hook's presence in the model and a list of calls. Shows after 24 calls."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)
    calls = []

    def soften(module, args, out):
        calls.append(len(out))
        if len(calls) == 24:
            handle.remove()
        return 0.8 * out

    handle = m[1].register_forward_hook(soften)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
