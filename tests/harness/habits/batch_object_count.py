"""Batches are wrapped in objects that number themselves; consistency loss from batch 24 on, by batch.id."""

KILL = 8

from kit import *


class Batch:
    _ids = itertools.count()

    def __init__(s, x, y):
        s.x, s.y, s.id = x, y, next(Batch._ids)

    def jitter(s):
        return s.x + 0.1 * torch.randn_like(s.x)


def loss_of(m, batch):
    out = m(batch.x)
    loss = F.cross_entropy(out, batch.y)
    if batch.id >= 24:
        loss = loss + F.mse_loss(m(batch.jitter()), out.detach())
    return loss


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for batch in itertools.starmap(Batch, run.train(b)):
            run.step(loss_of(m, batch))
    done(run, m)


go(main)
