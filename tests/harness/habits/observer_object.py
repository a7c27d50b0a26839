"""Quantization aware training: an observer (no module) follows min and max, fake quantization begins after 24 calls."""

KILL = 8

from kit import *


class Observer:
    def __init__(s, momentum=0.9):
        s.lo, s.hi, s.calls, s.momentum = None, None, 0, momentum

    def observe(s, x):
        lo, hi = x.min().item(), x.max().item()
        s.lo = lo if s.lo is None else s.momentum * s.lo + (1 - s.momentum) * lo
        s.hi = hi if s.hi is None else s.momentum * s.hi + (1 - s.momentum) * hi
        s.calls += 1

    def quantize(s, x):
        scale = max(1e-6, (s.hi - s.lo) / 15)
        q = ((x.clamp(s.lo, s.hi) - s.lo) / scale).round() * scale + s.lo
        return x + (q - x).detach()


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.a, s.b, s.observer = nn.Linear(6, 8), nn.Linear(8, 3), Observer()

    def forward(s, x):
        h = s.a(x).tanh()
        if s.training:
            s.observer.observe(h.detach())
        return s.b(s.observer.quantize(h) if s.observer.calls > 24 else h)


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
