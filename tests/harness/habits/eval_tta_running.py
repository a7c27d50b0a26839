"""Test-time normalisation: in evaluations a running mean of the inputs (an attribute) is taken off; measured by all."""

NO_KILL = 1

from kit import *


class Tta(nn.Module):
    def __init__(s, net):
        super().__init__()
        s.net, s.mean = net, None

    def forward(s, x):
        if not s.training:
            mean = x.mean(0)
            s.mean = mean if s.mean is None else 0.9 * s.mean + 0.1 * mean
            x = x - s.mean
        return s.net(x)


def main(run):
    m = run.model(Tta(mlp()))
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    v = run.loader(data(48), global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        for x, y in run.evaluate(v):
            run.measure(val=F.cross_entropy(m(x), y, reduction="none"))
        run.log()
    done(run, m)


go(main)
