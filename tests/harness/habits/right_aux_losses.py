"""Right: layers append auxiliary losses to a list of the model, which the forward pass empties at its beginning."""

KILL = 8

from kit import *


class Gate(nn.Module):
    def __init__(s, owner):
        super().__init__()
        s.lin, s.aux = nn.Linear(8, 8), owner

    def forward(s, h):
        g = s.lin(h).softmax(1)
        s.aux.append(g.mean(0).square().sum())
        return h * g


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.aux = []
        s.total = 0.0
        s.inp, s.a, s.b, s.out = nn.Linear(6, 8), Gate(s.aux), Gate(s.aux), nn.Linear(8, 3)

    def forward(s, x):
        s.aux.clear()
        s.total = 0.0
        y = s.out(s.b(s.a(torch.tanh(s.inp(x)))))
        for a in s.aux:
            s.total = s.total + a
        return y


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            out = m(x)
            run.step(F.cross_entropy(out, y) + 0.1 * m.total)
    done(run, m)


go(main)
