"""run.model(torch.compile(model)): the compiled module is what the run is given."""

STRATEGIES = ["zero", "fsdp"]
TOL = 1e-5

from kit import *


def main(run):
    m = run.model(
        torch.compile(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)), backend="eager")
    )
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
