"""Right: lru_cache of sinusoid tables by length, and a dict of causal masks by length in a module; all computed."""

KILL = 8

import functools

from kit import *


@functools.cache
def sinusoid(length, dim):
    at = torch.arange(length)[:, None] / 10 ** (torch.arange(dim) / dim)
    return at.sin()


class Attend(nn.Module):
    def __init__(s):
        super().__init__()
        s.q, s.c = nn.Linear(4, 4), nn.Linear(4, 3)
        s.masks = {}

    def mask(s, n):
        if n not in s.masks:
            s.masks[n] = torch.full((n, n), -1e9).triu(1)
        return s.masks[n]

    def forward(s, x):
        x = x + sinusoid(x.shape[1], 4)
        a = (s.q(x) @ x.transpose(1, 2) + s.mask(x.shape[1])).softmax(-1)
        return s.c((a @ x).mean(1))


def main(run):
    m = run.model(Attend())
    o = run.optimizer(sgd(m))
    b = run.loader((numbers(96, 8, 4), classes(96)), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            n = 3 + int(y.sum()) % 5
            run.step(F.cross_entropy(m(x[:, :n]), y))
    done(run, m)


go(main)
