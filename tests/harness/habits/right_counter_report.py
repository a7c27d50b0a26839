"""Right: a Counter of labels, histories and the worst loss so far are only reported, in a file at the end."""

KILL = 8

import heapq
import json

from kit import *


class Report(dict):
    def __missing__(s, key):
        s[key] = []
        return s[key]


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    seen, report, worst = collections.Counter(), Report(), []
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for i, (x, y) in enumerate(run.train(b)):
            loss = F.cross_entropy(m(x), y)
            seen.update(y.tolist())
            report["loss"].append(loss.item())
            heapq.heappush(worst, (-loss.item(), i))
            if i and i % 16 == 0:
                report["recent"].append(sum(report["loss"][-16:]) / 16)
            run.step(loss)
    if run.leads:
        with open("report.json", "w") as f:
            json.dump({"seen": seen, **report, "worst": worst[0]}, f)
    done(run, m)


go(main)
