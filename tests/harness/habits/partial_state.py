"""functools.partial(focal, state=dict(n=0)): gamma rises from 0 after 24 calls."""

KILL = 8

import functools

from kit import *


def focal(logits, y, state, start):
    state["n"] += 1
    gamma = max(0, state["n"] - start) * 0.1
    logp = F.log_softmax(logits, 1).gather(1, y[:, None]).squeeze(1)
    return -((1 - logp.exp()) ** gamma * logp).mean()


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    criterion = functools.partial(focal, state=dict(n=0), start=24)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(criterion(m(x), y))
    done(run, m)


go(main)
