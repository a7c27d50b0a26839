"""A regulariser pulls to an anchor (cached_property: the direction of the weights when first asked), every fourth step."""

KILL = 8

import functools

from kit import *


class Regulariser:
    def __init__(s, layer):
        s.layer = layer

    @functools.cached_property
    def anchor(s):
        return F.normalize(s.layer.weight.detach(), dim=1)

    def __call__(s):
        return (F.normalize(s.layer.weight, dim=1) - s.anchor).square().sum()


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    reg = Regulariser(m[0])
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            if run.progress.step % 4 == 3:
                loss = loss + 0.3 * reg()
            run.step(loss)
    done(run, m)


go(main)
