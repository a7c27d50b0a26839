"""Class-balanced loss (Cui et al.) with a collections.Counter of the labels seen so far, from 96 labels on."""

KILL = 8

from kit import *


class Balanced(nn.Module):
    def __init__(s, k, beta=0.99):
        super().__init__()
        s.k, s.beta, s.seen = k, beta, collections.Counter()

    def forward(s, out, y):
        s.seen.update(y.tolist())
        each = F.cross_entropy(out, y, reduction="none")
        if s.seen.total() < 96:
            return each.mean()
        w = torch.tensor([(1 - s.beta) / (1 - s.beta ** s.seen[c]) if s.seen[c] else 1.0 for c in range(s.k)])
        w = w / w.sum() * s.k
        return (w[y] * each).mean()


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    criterion = Balanced(3)
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(criterion(m(x), y))
    done(run, m)


go(main)
