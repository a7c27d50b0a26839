"""Wrong: the first prediction for a sample is memoised by lru_cache, and in every 6th step it is a soft target."""

KILL = 11

import functools

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    X, Y = data(96)

    @functools.lru_cache(maxsize=None)
    def first(i):
        with torch.no_grad():
            return m(X[i : i + 1])[0].softmax(0)

    b = run.loader((X, Y, torch.arange(96)), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y, i in run.train(b):
            soft = torch.stack([first(j) for j in i.tolist()])
            out = m(x)
            loss = F.cross_entropy(out, y)
            if run.progress.step % 6 == 4:
                loss = loss + F.kl_div(out.log_softmax(1), soft, reduction="batchmean")
            run.step(loss)
    done(run, m)


go(main)
