"""A frozen dataclass of options: a nested function replaces it when 24 batches are over."""

KILL = 8

from dataclasses import dataclass, replace

from kit import *


@dataclass(frozen=True)
class Config:
    drop: float = 0.0
    margin: float = 0.1
    batches: int = 0


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    cfg = Config()

    def after_batch():
        nonlocal cfg
        cfg = replace(cfg, batches=cfg.batches + 1)
        if cfg.batches == 24:
            cfg = replace(cfg, drop=0.4, margin=0.3)

    def forward(x, y):
        return F.multi_margin_loss(m(F.dropout(x, cfg.drop)), y, margin=cfg.margin)

    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(forward(x, y))
            after_batch()
    done(run, m)


go(main)
