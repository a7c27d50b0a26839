"""Wrong: contrast with earlier outputs, in a default argument: def loss(out, y, memory=[]); used from 30 entries on."""

KILL = 8

from kit import *


def criterion(out, y, memory=[]):
    loss = F.cross_entropy(out, y)
    if len(memory) >= 30:
        loss = loss + 0.1 * F.cosine_similarity(out.mean(0), memory[-30], dim=0)
    memory.append(out.detach().mean(0))
    return loss


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(criterion(m(x), y))
    done(run, m)


go(main)
