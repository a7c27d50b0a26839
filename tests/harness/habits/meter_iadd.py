"""Focal loss: gamma is 2 once the running average of this process (meter += loss) is below a limit, after 24 batches."""

KILL = 8

from kit import *
from labs.meters import Average


class Task:
    def __init__(s, model):
        s.model, s.meter = model, Average()

    @property
    def gamma(s):
        return 2.0 if len(s.meter) > 24 and float(s.meter) < 1.2 else 0.0

    def loss(s, x, y):
        each = F.cross_entropy(s.model(x), y, reduction="none")
        out = ((1 - (-each).exp()) ** s.gamma * each).mean()
        s.meter += each.mean().item()
        return out


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    task = Task(m)
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(task.loss(x, y))
    done(run, m)


go(main)
