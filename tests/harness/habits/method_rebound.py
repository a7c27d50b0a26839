"""A trainer rebinds its own method: compute = _late after 26 good micro-batches.

State: Trainer.good and the method rebound on the instance. Shows late, when losses were low 26 times."""

KILL = 8

from kit import *


class Trainer:
    def __init__(s, run):
        s.run, s.good = run, 0
        s.model = run.model(mlp())
        s.optimizer = run.optimizer(sgd(s.model))
        s.compute = s._early

    def _early(s, x, y):
        loss = F.cross_entropy(s.model(x), y)
        if loss.item() < 1.15:
            s.good += 1
            if s.good == 26:
                s.compute = s._late
        return loss

    def _late(s, x, y):
        out = s.model(x)
        return F.cross_entropy(out, y) + 0.1 * out.logsumexp(1).square().mean()

    def fit(s, batches):
        for e in s.run.epochs(3):
            for x, y in s.run.train(batches):
                s.run.step(s.compute(x, y))


def main(run):
    t = Trainer(run)
    t.fit(run.loader(data(192), global_batch=16, micro_batch=4))
    done(run, t.model)


go(main)
