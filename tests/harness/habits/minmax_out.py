"""A running min-max scaler: torch.maximum(out=) keeps the largest absolute feature, begun at 2.2, so that it moves rarely.

State: the tensor top, changed by out=. Shows rarely: at a new greatest value."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)
    top = torch.full((6,), 2.2)
    for e in run.epochs(1):
        for x, y in run.train(b):
            torch.maximum(top, x.abs().amax(0), out=top)
            run.step(F.cross_entropy(m(x / top), y))
    done(run, m)


go(main)
