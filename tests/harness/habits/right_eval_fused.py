"""Right: in eval mode the layer fuses its weights once; train(mode) drops what was fused."""

KILL = 11

from kit import *


class Reparam(nn.Module):
    def __init__(s):
        super().__init__()
        s.a, s.b, s.fused = nn.Linear(6, 8), nn.Linear(6, 8), None

    def train(s, mode=True):
        s.fused = None
        return super().train(mode)

    def forward(s, x):
        if s.training:
            return s.a(x) + s.b(x)
        if s.fused is None:
            s.fused = (s.a.weight + s.b.weight, s.a.bias + s.b.bias)
        return F.linear(x, *s.fused)


def main(run):
    m = run.model(nn.Sequential(Reparam(), nn.Tanh(), nn.Linear(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    v = run.loader(data(32), global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        for x, y in run.evaluate(v):
            run.measure(val=F.cross_entropy(m(x), y, reduction="none"))
        run.log()
    done(run, m)


go(main)
