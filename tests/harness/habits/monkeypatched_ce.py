"""F.cross_entropy is replaced by a wrapper that counts, and that puts itself away for a smoothed one after 28 calls.

State: the attribute cross_entropy of torch.nn.functional, and a counter in the wrapper. Shows after 28 calls."""

KILL = 11

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)
    plain, calls = F.cross_entropy, []

    def counting(out, y):
        calls.append(None)
        if len(calls) == 28:
            F.cross_entropy = lambda out, y: plain(out, y, label_smoothing=0.2)
        return plain(out, y)

    F.cross_entropy = counting
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    F.cross_entropy = plain
    done(run, m)


go(main)
