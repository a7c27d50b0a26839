"""Right: a progress bar of one's own with a postfix, logging with a file handler, a warn-once flag."""

KILL = 8

import logging
import warnings

from kit import *


class Bar:
    def __init__(s, it, total):
        s.it, s.total, s.n, s.postfix, s.start = it, total, 0, {}, time.time()

    def set_postfix(s, **kw):
        s.postfix.update(kw)

    def __iter__(s):
        for item in s.it:
            yield item
            s.n += 1
            if s.n % 8 == 0:
                rate = s.n / max(1e-9, time.time() - s.start)
                print(f"{s.n}/{s.total} {rate:.1f} it/s {s.postfix}")


class Model(nn.Module):
    def __init__(s):
        super().__init__()
        s.net, s.warned = mlp(), False

    def forward(s, x):
        if not s.warned and x.abs().max() > 2.5:
            warnings.warn("large inputs")
            s.warned = True
        return s.net(x)


def main(run):
    log = logging.getLogger("habit")
    log.setLevel(logging.INFO)
    log.propagate = False
    if run.leads:
        log.addHandler(logging.FileHandler("train.log"))
    m = run.model(Model())
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        bar, smooth = Bar(run.train(b), len(b)), None
        for x, y in bar:
            loss = F.cross_entropy(m(x), y)
            run.step(loss)
            smooth = loss.item() if smooth is None else 0.9 * smooth + 0.1 * loss.item()
            bar.set_postfix(loss=f"{smooth:.3f}", lr=o.param_groups[0]["lr"])
            log.info("epoch %d step %d loss %.4f", e, run.progress.step, smooth)
    done(run, m)


go(main)
