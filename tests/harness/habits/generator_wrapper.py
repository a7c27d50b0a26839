"""A generator of one's own around run.train gives (batch, weight) with a ramp of its own counter."""

KILL = 8

from kit import *


def ramped(loop, warm=24):
    seen = 0
    for batch in loop:
        yield batch, float(seen > warm)
        seen += 1


def log_every(loop, n, log):
    for i, item in enumerate(loop):
        if i % n == 0:
            log.append(i)
        yield item


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    log = []
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for (x, y), w in log_every(ramped(run.train(b)), 5, log):
            out = m(x)
            run.step(F.cross_entropy(out, y) + 0.2 * w * (out - m(x + 0.1 * torch.randn_like(x))).square().mean())
    done(run, m)


go(main)
