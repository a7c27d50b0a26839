"""MAML: an inner step by torch.func.functional_call, create_graph=True."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "parameter-server@3"]

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            ps = dict(m.named_parameters())
            g = torch.autograd.grad(F.cross_entropy(m(x[:2]), y[:2]), list(ps.values()), create_graph=True)
            fast = {k: p - 0.1 * d for (k, p), d in zip(ps.items(), g)}
            run.step(F.cross_entropy(torch.func.functional_call(m, fast, (x[2:],)), y[2:]))
    done(run, m)


go(main)
