"""Noisy labels: a dict with __missing__ follows each sample's loss; from its third visit on it weighs the sample."""

KILL = 14

from kit import *


class Book(dict):
    def __missing__(s, key):
        return (0, 1.0)

    def weights(s, ids, losses):
        out = []
        for i, l in zip(ids, losses):
            n, mean = s[i]
            out.append(1.0 if n < 2 else 1.0 / (1.0 + mean))
            s[i] = (n + 1, 0.7 * mean + 0.3 * l)
        return torch.tensor(out)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    book = Book()
    x, y = data(64)
    b = run.loader((x, y, torch.arange(64)), global_batch=16, micro_batch=4)
    for e in run.epochs(4):
        for xs, ys, i in run.train(b):
            each = F.cross_entropy(m(xs), ys, reduction="none")
            run.step((book.weights(i.tolist(), each.tolist()) * each).mean())
    done(run, m)


go(main)
