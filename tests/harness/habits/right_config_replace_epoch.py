"""Right: a frozen dataclass is replaced at the begin of each epoch, as a function of the epoch."""

KILL = 8

from dataclasses import dataclass, replace

from kit import *


@dataclass(frozen=True)
class Config:
    noise: float = 0.0
    margin: float = 0.1

    def of_epoch(s, e):
        return replace(s, noise=0.1 * e, margin=s.margin + 0.05 * e)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    base = Config()
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        cfg = base.of_epoch(e)
        noisy = lambda x: x + cfg.noise * torch.randn_like(x)
        for x, y in run.train(b):
            run.step(F.multi_margin_loss(m(noisy(x)), y, margin=cfg.margin))
    done(run, m)


go(main)
