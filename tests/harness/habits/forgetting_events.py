"""Forgetting events: a dict of lists by sample index, from all ranks; samples that were never forgotten are left out later."""

KILL = 14

import itertools

from kit import *


def never_forgotten(stats, n):
    kept = []
    for i in range(n):
        row = stats.get(i, [])
        forgets = sum(1 for a, b in itertools.pairwise(row) if a and not b)
        if forgets > 0 or not all(row):
            kept.append(i)
    return kept or list(range(n))


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m, lr=0.5))
    x, y = data(64)
    stats = {}

    def order(epoch, generator):
        chosen = never_forgotten(stats, 64) if epoch >= 3 else list(range(64))
        return torch.tensor(chosen)[torch.randperm(len(chosen), generator=generator)]

    b = run.loader((x, y, torch.arange(64)), order=order, global_batch=16, micro_batch=4)
    found = []
    for e in run.epochs(5):
        for x, y, i in run.train(b):
            out = m(x)
            if run.counts:
                found += list(zip(i.tolist(), (out.argmax(1) == y).tolist()))
            run.step(F.cross_entropy(out, y))
        for part in run.gather(found):
            for k, right in part:
                stats.setdefault(k, []).append(right)
        found.clear()
    done(run, m)


go(main)
