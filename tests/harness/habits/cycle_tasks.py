"""Wrong: itertools.cycle of augmentation strengths, long equal phases: next(strengths) in each body."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    strengths = itertools.cycle([0.0] * 30 + [0.3] * 10)
    for e in run.epochs(1):
        for x, y in run.train(b):
            x = x + next(strengths) * torch.randn_like(x)
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
