"""Wrong after a resume: temporal ensembling. Z = 0.6 Z + 0.4 z after each epoch (gathered); used from epoch 3 on."""

KILL = 11

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    x, y = data(96)
    b = run.loader((x, y, torch.arange(96)), global_batch=16, micro_batch=4)
    v = run.loader((x, y), global_batch=16, micro_batch=4, shuffle=False)
    Z = torch.zeros(96, 3)
    for e in run.epochs(4):
        for a, t, i in run.train(b):
            out = m(a)
            loss = F.cross_entropy(out, t)
            if e >= 3:
                loss = loss + F.mse_loss(out.softmax(1), Z[i] / (1 - 0.6**e))
            run.step(loss)
        mine = []
        for a, t in run.evaluate(v):
            if run.counts if hasattr(run, "counts") else True:
                mine.append(m(a).softmax(1))
        z = torch.cat([p for part in run.gather(mine) for p in part])
        Z = 0.6 * Z + 0.4 * z
    done(run, m)


go(main)
