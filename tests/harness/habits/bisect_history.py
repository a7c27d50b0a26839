"""Self-paced learning: losses are kept sorted (bisect.insort), those above the 80 % quantile of the past count half."""

KILL = 8

import bisect

from kit import *


class Quantile:
    def __init__(s, warm=80):
        s.sorted, s.warm = [], warm

    def limit(s, q):
        return s.sorted[int(q * len(s.sorted))] if len(s.sorted) >= s.warm else math_inf

    def add(s, values):
        for v in values:
            bisect.insort(s.sorted, v)


math_inf = float("inf")


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    past = Quantile()
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            each = F.cross_entropy(m(x), y, reduction="none")
            weight = torch.where(each.detach() > past.limit(0.8), 0.5, 1.0)
            past.add(each.tolist())
            run.step((weight * each).mean())
    done(run, m)


go(main)
