"""Class centers by lru_cache of (epoch): made with the weights at the epoch's begin, used in each third step."""

KILL = 8

import functools

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    xs, ys = data(160)

    @functools.lru_cache(maxsize=1)
    def centers(epoch):
        with torch.no_grad():
            h = m[:2](xs)
        return torch.stack([h[ys == c].mean(0) for c in range(3)])

    b = run.loader((xs, ys), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        table = centers(e)
        for x, y in run.train(b):
            h = m[:2](x)
            loss = F.cross_entropy(m[2](h), y)
            if run.progress.step % 3 == 1:
                loss = loss + 0.3 * F.mse_loss(h, table[y])
            run.step(loss)
    done(run, m)


go(main)
