"""Monotone nets: self.l.weight.data.clamp_(min=0) at the beginning of forward; the same on all ranks."""

STRATEGIES = ["zero", "fsdp"]

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.a, s.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(s, x):
        s.b.weight.data.clamp_(min=0)
        return s.b(s.a(x).tanh())


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
