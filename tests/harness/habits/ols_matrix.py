"""Online label smoothing: a matrix is summed up in the body where a sample is right, and is the next epoch's target."""

KILL = 8

from kit import *


class OLS:
    def __init__(s, k):
        s.target, s.sum, s.count = torch.full((k, k), 1 / k), torch.zeros(k, k), torch.zeros(k)

    def __call__(s, out, y):
        with torch.no_grad():
            p = out.softmax(1)
            right = p.argmax(1) == y
            s.sum.index_add_(0, y[right], p[right])
            s.count += torch.bincount(y[right], minlength=len(s.count))
        soft = -(s.target[y] * out.log_softmax(1)).sum(1).mean()
        return 0.5 * F.cross_entropy(out, y) + 0.5 * soft

    def next_epoch(s):
        s.target = torch.where(s.count[:, None] > 0, s.sum / s.count[:, None].clamp(min=1), s.target)
        s.sum, s.count = torch.zeros_like(s.sum), torch.zeros_like(s.count)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    ols = OLS(3)
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(ols(m(x), y))
        ols.next_epoch()
    done(run, m)


go(main)
