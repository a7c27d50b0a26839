"""Right: generators around run.train that augment with torch's random numbers, and count only to print."""

KILL = 8

from kit import *


def augmented(loop, strength):
    for x, y in loop:
        yield x + strength * torch.randn_like(x), y


def watched(loop, every=7):
    lines = []
    for i, item in enumerate(loop):
        if i % every == 0:
            lines.append(f"{i} batches")
        yield item
    return lines


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in watched(augmented(run.train(b), 0.1)):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
