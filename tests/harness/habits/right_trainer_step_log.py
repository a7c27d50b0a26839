"""Right: a trainer whose training_step counts, and logs to a CSV writer and a dict of SummaryWriter-like scalars every n."""

KILL = 8

import csv

from kit import *


class Writer:
    def __init__(s):
        s.rows = collections.defaultdict(dict)

    def add_scalar(s, tag, value, step):
        s.rows[step][tag] = value


class Trainer:
    def __init__(s, run):
        s.run, s.global_step, s.log_interval, s.writer = run, 0, 5, Writer()
        s.model = run.model(mlp())
        s.optimizer = run.optimizer(sgd(s.model))
        s.losses, s.best = [], None

    def training_step(s, batch):
        x, y = batch
        loss = F.cross_entropy(s.model(x), y)
        s.losses.append(loss.item())
        if s.global_step % s.log_interval == 0:
            s.writer.add_scalar("loss", np.mean(s.losses[-s.log_interval :]), s.global_step)
            s.writer.add_scalar("lr", s.optimizer.param_groups[0]["lr"], s.global_step)
        s.global_step += 1
        return loss

    def fit(s, batches, epochs):
        for e in s.run.epochs(epochs):
            for batch in s.run.train(batches):
                s.run.step(s.training_step(batch))
            mean = sum(s.losses) / max(1, len(s.losses))
            s.best = mean if s.best is None else min(s.best, mean)
            s.losses.clear()
        with open("log.csv", "w", newline="") as f:
            out = csv.writer(f)
            for step, row in sorted(s.writer.rows.items()):
                out.writerow([step, *row.values()])


def main(run):
    t = Trainer(run)
    t.fit(run.loader(data(96), global_batch=16, micro_batch=4), 2)
    done(run, t.model)


go(main)
