"""Wrong: losses of samples go into an sqlite table in memory; later, samples above the average count double."""

KILL = 8

import sqlite3

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    x, y = data(96)
    b = run.loader((x, y, torch.arange(96)), global_batch=16, micro_batch=4)
    db = sqlite3.connect(":memory:")
    db.execute("create table losses (i integer primary key, loss real)")
    for e in run.epochs(4):
        for a, t, i in run.train(b):
            each = F.cross_entropy(m(a), t, reduction="none")
            w = torch.ones(len(a))
            if run.progress.step % 6 == 5 and e > 0:
                (mean,) = db.execute("select avg(loss) from losses").fetchone()
                for k, j in enumerate(i.tolist()):
                    row = db.execute("select loss from losses where i = ?", (j,)).fetchone()
                    if row and row[0] > mean:
                        w[k] = 2.0
            run.step((w * each).mean())
            db.executemany("insert or replace into losses values (?, ?)", zip(i.tolist(), each.tolist()))
    done(run, m)


go(main)
