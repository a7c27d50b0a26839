"""Diffusion: times and noise drawn from a torch.Generator of the script in the body."""

from kit import *


def main(run):
    m = run.model(mlp(d=7, k=6))
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    g = torch.Generator().manual_seed(0)
    for e in run.epochs(2):
        for x, _ in run.train(b):
            t = torch.rand(len(x), 1, generator=g)
            n = torch.randn(x.shape, generator=g)
            run.step(F.mse_loss(m(torch.cat([x * t + n * (1 - t), t], 1)), n))
    done(run, m)


go(main)
