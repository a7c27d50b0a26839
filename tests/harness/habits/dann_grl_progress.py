"""DANN: a gradient reversal (autograd.Function with a coefficient in a class attribute), set by run.progress.step."""

STRATEGIES = ["zero", "fsdp"]

from kit import *


class Reverse(torch.autograd.Function):
    alpha = 0.0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -Reverse.alpha * g


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.f, s.c, s.d = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(s, x):
        h = s.f(x)
        return s.c(h), s.d(Reverse.apply(h))


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m))
    source = run.loader(data(64), global_batch=16, micro_batch=4)
    target = run.loader((numbers(64, 6, seed=8) + 1,), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for (x, y), (w,) in run.train(source, target):
            p = run.progress.step / (2 * len(source))
            Reverse.alpha = 2 / (1 + np.exp(-10 * p)) - 1
            c, d = m(x)
            _, t = m(w)
            domain = torch.cat([torch.zeros(len(x)), torch.ones(len(w))]).long()
            run.step(F.cross_entropy(c, y) + F.cross_entropy(torch.cat([d, t]), domain))
    done(run, m)


go(main)
