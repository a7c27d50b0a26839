"""`d.p *= 0.5` of each dropout at the end of each epoch: an attribute of a module that the script changes."""

KILL = 8

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.8), nn.Linear(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(4):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        for d in m.modules():
            if isinstance(d, nn.Dropout):
                d.p *= 0.5
    done(run, m)


go(main)
