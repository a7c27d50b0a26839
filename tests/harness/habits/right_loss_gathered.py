"""Right: a scale from the gathered losses of a step, kept, as the documentation shows it."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    run.keep(scale=1.0)
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    losses = []
    for e in run.epochs(1):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y) * run.kept.scale
            if run.counts:
                losses.append(loss.detach())
            if run.step(loss):
                of_step = torch.stack([each for part in run.gather(losses) for each in part]).mean()
                run.kept.scale = 0.9 * run.kept.scale + 0.1 * float(of_step)
                losses.clear()
    done(run, m)


go(main)
