"""compiled = torch.compile(model) after run.model, by hand; the eager backend."""

STRATEGIES = ["zero", "fsdp"]
TOL = 1e-5

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))
    c = torch.compile(m, backend="eager")
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(c(x), y))
    done(run, m)


go(main)
