"""Wrong: a gradient-reversal Function counts its backward passes in a class attribute; lambda begins after 40 of them."""

KILL = 8

from kit import *


class Reverse(torch.autograd.Function):
    seen = 0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        Reverse.seen += 1
        lam = max(0.0, (Reverse.seen - 40) / 40)
        return -lam * g


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.body, s.head, s.domain = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(s, x):
        h = torch.tanh(s.body(x))
        return s.head(h), s.domain(Reverse.apply(h))


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m))
    x, y = data(384)
    b = run.loader((x, y, (x[:, 0] > 0).long()), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y, d in run.train(b):
            a, c = m(x)
            run.step(F.cross_entropy(a, y) + F.cross_entropy(c, d))
    done(run, m)


go(main)
