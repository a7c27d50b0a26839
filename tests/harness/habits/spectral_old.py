"""torch.nn.utils.spectral_norm (the old one: hooks and buffers), and weight_norm of parametrizations."""

STRATEGIES = ["zero", "fsdp"]

from kit import *


def main(run):
    n = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))
    nn.utils.parametrizations.weight_norm(n[2])
    m = run.model(n)
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
