"""A forward hook follows the mean activation in a dict (0.9 / 0.1); from step 6 the loss pulls the activations to it."""

KILL = 8

from kit import *


def watch(layer, stats, name):
    def hook(module, args, out):
        stats[name] = 0.9 * stats.get(name, 0.0) + 0.1 * out.detach().mean(0)

    return layer.register_forward_hook(hook)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    stats = {}
    watch(m[0], stats, "hidden")
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            if run.progress.step >= 6:
                loss = loss + 0.3 * (m[0].weight @ x.mean(0) - stats["hidden"]).square().mean()
            run.step(loss)
    done(run, m)


go(main)
