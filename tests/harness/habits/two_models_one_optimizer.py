"""Encoder and decoder as two models, one optimizer over both, one of them called twice; clip_norm."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2"]

from kit import *


def main(run):
    a, c = run.model(nn.Linear(6, 8)), run.model(nn.Linear(8, 6))
    o = run.optimizer(torch.optim.Adam([*a.parameters(), *c.parameters()], lr=0.01))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, _ in run.train(b):
            run.step(F.mse_loss(c(a(x).tanh()), x) + a(x).square().mean())
    done(run, a, c)


go(main, clip_norm=0.5)
