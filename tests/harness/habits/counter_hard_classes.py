"""Wrong after a resume: a Counter of the worst class of each evaluation; a class that was worst three times counts double."""

KILL = 11

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, lr=0.02))
    X, Y = data(96)
    b = run.loader((X, Y), global_batch=16, micro_batch=4)
    v = run.loader((X, Y), global_batch=16, micro_batch=4, shuffle=False)
    worst = collections.Counter()
    for e in run.epochs(5):
        often = [c for c, n in worst.items() if n >= 3]
        for x, y in run.train(b):
            w = torch.tensor([2.0 if c in often else 1.0 for c in y.tolist()])
            run.step((w * F.cross_entropy(m(x), y, reduction="none")).mean())
        right = torch.zeros(3)
        for x, y in run.evaluate(v):
            if run.counts:
                right += torch.bincount(y[m(x).argmax(1) == y], minlength=3)
        right = run.sum(right)
        worst[int((right / torch.bincount(Y, minlength=3)).argmin())] += 1
    done(run, m)


go(main)
