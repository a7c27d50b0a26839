"""Noisy student: after each epoch gathered confident predictions become labels of the data set's tensor; not kept."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    x, y = data(64)
    soft = F.one_hot(y, 3).float()
    index = torch.arange(64)
    b = run.loader((x, index), global_batch=16, micro_batch=4)
    v = run.loader((x, index), global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(4):
        for xs, i in run.train(b):
            target = soft[i] if run.progress.step % 4 == 3 else F.one_hot(y[i], 3).float()
            run.step(F.cross_entropy(m(xs), target))
        mine = []
        for xs, i in run.evaluate(v):
            if run.counts:
                mine.append(m(xs).softmax(1))
        p = torch.cat([t for part in run.gather(mine) for t in part])
        sure = p.max(1).values > 0.45
        soft[sure] = p[sure]
    done(run, m)


go(main)
