"""Right: sets of sample ids that were seen, duplicates, a Counter of sources, a heap of worst samples for a report, a WeakSet."""

KILL = 8

import heapq
import weakref

from kit import *


class Report:
    live = weakref.WeakSet()

    def __init__(s):
        s.seen, s.twice, s.sources, s.worst = set(), 0, collections.Counter(), []
        Report.live.add(s)

    def add(s, idx, losses):
        for i, l in zip(idx.tolist(), losses.tolist()):
            s.twice += i in s.seen
            s.seen.add(i)
            s.sources["even" if i % 2 == 0 else "odd"] += 1
            heapq.heappush(s.worst, (l, i))
            del s.worst[:-16]


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    x, y = data(96)
    b = run.loader((x, y, torch.arange(96)), global_batch=16, micro_batch=4)
    report = Report()
    for e in run.epochs(2):
        for x, y, idx in run.train(b):
            losses = F.cross_entropy(m(x), y, reduction="none")
            report.add(idx, losses)
            run.step(losses.mean())
        print(len(report.seen), report.twice, report.sources, report.worst[:2], len(Report.live))
    done(run, m)


go(main)
