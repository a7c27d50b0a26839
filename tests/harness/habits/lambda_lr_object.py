"""LambdaLR whose function reads an object that is changed after each evaluation, by a metric of all ranks; not kept."""

KILL = 11

from kit import *


class Control:
    def __init__(s):
        s.scale, s.best = 1.0, float("inf")

    def report(s, value):
        if value > 0.5 * s.best:
            s.scale *= 0.3
        s.best = min(s.best, value)

    def __call__(s, step):
        return s.scale if step % 4 == 3 else 1.0


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    control = Control()
    run.scheduler(torch.optim.lr_scheduler.LambdaLR(o, lambda t: control(t)))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    v = run.loader(data(32), global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        for x, y in run.evaluate(v):
            run.measure(val=F.cross_entropy(m(x), y, reduction="none"))
        control.report(run.metrics["val"])
    done(run, m)


go(main)
