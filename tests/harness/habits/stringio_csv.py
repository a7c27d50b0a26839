"""The log of losses is a CSV in memory; once it has 24 rows its mean decides on label smoothing."""

KILL = 8

import csv
import io

from kit import *


class Recorder:
    def __init__(s):
        s.file = io.StringIO()
        s.writer = csv.writer(s.file)

    def write(s, *row):
        s.writer.writerow(row)

    def column(s, i):
        return [float(row[i]) for row in csv.reader(io.StringIO(s.file.getvalue()))]


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    log = Recorder()
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            losses = log.column(1)
            smooth = 0.1 * float(np.mean(losses[-8:])) if len(losses) >= 24 else 0.0
            loss = F.cross_entropy(m(x), y, label_smoothing=min(0.5, smooth))
            log.write(run.progress.step, loss.item())
            run.step(loss)
    done(run, m)


go(main)
