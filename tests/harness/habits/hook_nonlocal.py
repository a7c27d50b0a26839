"""A forward hook counts its calls by nonlocal, and adds noise to the output of a layer after 20 of them."""

KILL = 8

from kit import *


def noise_after(layer, start):
    calls = 0

    def hook(module, args, out):
        nonlocal calls
        calls += 1
        return out + 0.2 * torch.randn_like(out) if calls > start else None

    return layer.register_forward_hook(hook)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    noise_after(m[0], 20)
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
