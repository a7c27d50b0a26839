"""Dropout, BatchNorm, noise added in the body, and a loss that draws random numbers; run.step(loss, x, y)."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "pipeline", "pipeline:schedule=gpipe", "parameter-server@3"]

from kit import *


def loss(out, y):
    return F.cross_entropy(out + 0.1 * torch.randn_like(out), y)


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3)))
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(loss, x + 0.1 * torch.randn_like(x), y)
    done(run, m)


go(main)
