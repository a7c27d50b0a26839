"""A module is added after run.model and before the optimizer: model.extra = nn.Linear(...)."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "parameter-server@3"]

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.Linear(6, 8)
        s.extra = nn.Identity()

    def forward(s, x):
        return s.extra(s.a(x).tanh())


def main(run):
    m = run.model(Net())
    m.extra = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
