"""The hardest samples of all ranks in a heap, filled once a step by run.gather and used in every sixth step; not kept."""

KILL = 8

import heapq

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    x, y = data(192)
    b = run.loader((x, y, torch.arange(192)), global_batch=16, micro_batch=4)
    heap, found = [], []
    for e in run.epochs(1):
        for xs, ys, idx in run.train(b):
            each = F.cross_entropy(m(xs), ys, reduction="none")
            loss = each.mean()
            if (run.progress.step + 1) % 6 == 0:
                hard = torch.tensor(sorted(i for _, i in heap))
                loss = loss + 0.5 * F.cross_entropy(m(x[hard]), y[hard])
            if run.counts:
                found.append(list(zip(each.tolist(), idx.tolist())))
            if run.step(loss):
                for part in run.gather(found):
                    for micro in part:
                        for pair in micro:
                            heapq.heappush(heap, pair)
                            if len(heap) > 8:
                                heapq.heappop(heap)
                found.clear()
    done(run, m)


go(main)
