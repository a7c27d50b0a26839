"""Right: a model that counts its forward passes and the samples it saw, for a print now and then."""

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.net, s.calls, s.seen = mlp(), 0, 0

    def forward(s, x):
        s.calls += 1
        s.seen += len(x)
        if s.calls % 10 == 0:
            print("forward", s.calls, s.seen)
        return s.net(x)


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
