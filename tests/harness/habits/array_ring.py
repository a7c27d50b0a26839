"""Wrong: losses go into an array.array; when 32 are in it, losses above its 90th percentile are clipped."""

KILL = 8

import array
import statistics

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    ring = array.array("d")
    for e in run.epochs(1):
        for x, y in run.train(b):
            each = F.cross_entropy(m(x), y, reduction="none")
            ring.extend(each.tolist())
            del ring[:-128]
            if len(ring) == 128:
                each = each.clamp(max=statistics.quantiles(ring, n=10)[7])
            run.step(each.mean())
    done(run, m)


go(main)
