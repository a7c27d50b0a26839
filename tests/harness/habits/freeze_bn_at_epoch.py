"""`if epoch == 1: model.bn.eval()` once (detection, fine-tuning): the mode of a module stays from then on."""

KILL = 8
STRATEGIES = ["zero", "fsdp"]

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(4):
        if e == 1:
            m[1].eval()
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
