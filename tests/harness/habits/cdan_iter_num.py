"""CDAN's adversarial network: self.iter_num += 1 in forward, and x.register_hook(grl_hook(coefficient)): only gradients show it."""

from kit import *


class Adversary(nn.Module):
    def __init__(s):
        super().__init__()
        s.l, s.iter_num, s.max_iter = nn.Linear(8, 2), 0, 100.0

    def forward(s, x):
        if s.training:
            s.iter_num += 1
        coefficient = 2.0 / (1 + np.exp(-10 * s.iter_num / s.max_iter)) - 1
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda g: -coefficient * g)
        return s.l(x)


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.f, s.c, s.d = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 3), Adversary()

    def forward(s, x):
        h = s.f(x)
        return s.c(h), s.d(h)


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m))
    b = run.loader((*data(64), classes(64, 2)), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y, z in run.train(b):
            c, d = m(x)
            run.step(F.cross_entropy(c, y) + F.cross_entropy(d, z))
    done(run, m)


go(main)
