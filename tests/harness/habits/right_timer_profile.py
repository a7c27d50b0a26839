"""Right: timers, meters (+=), ETA by datetime and a CSV in memory, all for the log only."""

KILL = 8

import csv
import datetime
import io

from kit import *
from labs.meters import Average


class Timer:
    def __init__(s):
        s.start, s.laps = time.perf_counter(), Average()

    def __enter__(s):
        s.t = time.perf_counter()
        return s

    def __exit__(s, *e):
        s.laps += time.perf_counter() - s.t


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    timer, meter, out = Timer(), Average(), io.StringIO()
    rows = csv.writer(out)
    began = datetime.datetime.now()
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            with timer:
                loss = F.cross_entropy(m(x), y)
            meter += loss.item()
            if len(meter) % 10 == 0:
                eta = (datetime.datetime.now() - began) / len(meter) * (12 - run.progress.step)
                rows.writerow([len(meter), float(meter), float(timer.laps), str(eta)])
            run.step(loss)
    done(run, m)


go(main)
