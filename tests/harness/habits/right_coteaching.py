"""Right: co-teaching, two nets choose small-loss samples of a micro-batch for each other; the forget rate is by epoch."""

NO_PLAIN = 1

from kit import *


def loss_coteaching(y1, y2, t, forget_rate):
    loss_1, loss_2 = (F.cross_entropy(y, t, reduction="none") for y in (y1, y2))
    ind_1, ind_2 = loss_1.argsort(), loss_2.argsort()
    num = max(1, int((1 - forget_rate) * len(t)))
    return F.cross_entropy(y1[ind_2[:num]], t[ind_2[:num]]), F.cross_entropy(y2[ind_1[:num]], t[ind_1[:num]])


def main(run):
    n1, n2 = run.model(mlp()), run.model(mlp())
    o1, o2 = run.optimizer(adam(n1)), run.optimizer(adam(n2))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    rate_schedule = np.ones(4) * 0.5
    rate_schedule[:3] = np.linspace(0, 0.5, 3)
    pure = []
    for e in run.epochs(4):
        for x, y in run.train(b):
            l1, l2 = loss_coteaching(n1(x), n2(x), y, rate_schedule[e])
            run.step(l1, optimizer=o1)
            run.step(l2, optimizer=o2)
            pure.append((l1.item(), l2.item()))
        print(f"epoch {e}: {np.mean(pure, 0)}")
    done(run, n1, n2)


go(main)
