"""The idiom for frozen batch norm by a loop at each epoch's top: for x in modules: if BatchNorm: x.eval()."""

STRATEGIES = ["zero", "fsdp"]

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x in m.modules():
            if isinstance(x, nn.BatchNorm1d):
                x.eval()
                x.weight.requires_grad_(True)
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
