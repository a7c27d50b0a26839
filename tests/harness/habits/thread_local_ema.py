"""threading.local keeps a smoothed loss; when it has fallen under 1.0 entropy is penalized.

State: attributes of a threading.local at module level. Shows when the smoothed loss is low, after some steps."""

KILL = 8

import threading

from kit import *

ctx = threading.local()


def smooth(value):
    ctx.value = getattr(ctx, "value", 2.0) * 0.93 + value * 0.07
    return ctx.value


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            out = m(x)
            loss = F.cross_entropy(out, y)
            if smooth(loss.item()) < 1.3:
                p = out.softmax(1)
                loss = loss - 0.1 * (p * p.clamp(min=1e-6).log()).sum(1).mean()
            run.step(loss)
    done(run, m)


go(main)
