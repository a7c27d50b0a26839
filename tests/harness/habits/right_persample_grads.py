"""Right: per-sample gradients by torch.func weight the samples; norms are collected in a list on the module for a plot."""

KILL = 8

from kit import *
from torch.func import functional_call, grad, vmap


def main(run):
    m = run.model(mlp())
    m.norms = []
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)

    def one(params, x, y):
        return F.cross_entropy(functional_call(m, params, (x[None],)), y[None])

    for e in run.epochs(2):
        m.norms = []
        for x, y in run.train(b):
            params = {n: p.detach() for n, p in m.named_parameters()}
            g = vmap(grad(one), (None, 0, 0))(params, x, y)
            norm = sum(v.flatten(1).square().sum(1) for v in g.values()).sqrt()
            m.norms.append(norm.mean().item())
            run.step((F.cross_entropy(m(x), y, reduction="none") / (1 + norm)).mean())
        print(f"{np.mean(m.norms):.3f}")
    done(run, m)


go(main)
