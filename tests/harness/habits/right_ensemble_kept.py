"""Right: temporal ensembling with its table kept by run.keep, and gathered predictions."""

KILL = 11

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    x, y = data(96)
    b = run.loader((x, y, torch.arange(96)), global_batch=16, micro_batch=4)
    v = run.loader((x, y), global_batch=16, micro_batch=4, shuffle=False)
    run.keep(Z=torch.zeros(96, 3))
    for e in run.epochs(4):
        for a, t, i in run.train(b):
            out = m(a)
            loss = F.cross_entropy(out, t)
            if e >= 2:
                loss = loss + F.mse_loss(out.softmax(1), run.kept.Z[i] / (1 - 0.6**e))
            run.step(loss)
        mine = []
        for a, t in run.evaluate(v):
            if run.counts:
                mine.append(m(a).softmax(1))
        run.kept.Z = 0.6 * run.kept.Z + 0.4 * torch.cat([p for part in run.gather(mine) for p in part])
    done(run, m)


go(main)
