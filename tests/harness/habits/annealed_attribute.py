"""Gumbel softmax whose temperature is a plain attribute that each forward pass lowers."""

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.a, s.b, s.tau = nn.Linear(6, 8), nn.Linear(8, 3), 2.0

    def forward(s, x):
        h = F.gumbel_softmax(s.a(x), tau=s.tau)
        if s.training:
            s.tau = max(0.5, s.tau * 0.98)
        return s.b(h)


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
