"""Task weights changed by torch.lerp(w, l, 0.1, out=w) in a helper; applied where the step is past eight."""

KILL = 8

from kit import *


def update(weights, losses):
    torch.lerp(weights, losses, 0.1, out=weights)
    return weights


def main(run):
    m = run.model(mlp(k=6))
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    weights, one = torch.ones(2), torch.ones(2)
    for e in run.epochs(1):
        for x, y in run.train(b):
            a, c = m(x).split(3, 1)
            losses = torch.stack([F.cross_entropy(a, y), F.cross_entropy(c, 2 - y)])
            w = update(weights, losses.detach())
            run.step((losses * (w if run.progress.step > 8 else one)).sum())
    done(run, m)


go(main)
