"""Stochastic depth: each block has random.Random(seed); blocks are dropped from step 6 on."""

KILL = 8

from kit import *


class Block(nn.Module):
    def __init__(s, d, seed):
        super().__init__()
        s.f, s.rng, s.p = nn.Linear(d, d), random.Random(seed), 0.0

    def forward(s, x):
        if s.training and s.p > 0 and s.rng.random() < s.p:
            return x
        return x + s.f(x).tanh()


def main(run):
    m = run.model(nn.Sequential(*[Block(6, i) for i in range(3)], nn.Linear(6, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            for block in m[:-1]:
                block.p = 0.4 if run.progress.step >= 6 else 0.0
            run.step(F.cross_entropy(m(x), y) + 0.0 * sum(p.sum() for p in m.parameters()))
    done(run, m)


go(main)
