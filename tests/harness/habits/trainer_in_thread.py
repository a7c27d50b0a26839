"""A Trainer class, whose fit() runs in a thread."""

STRATEGIES = ["zero"]

import threading

from kit import *


class Trainer:
    def __init__(s, run):
        s.run = run
        s.m = run.model(mlp())
        s.o = run.optimizer(adam(s.m))
        s.b = run.loader(data(), global_batch=16, micro_batch=4)

    def training_step(s, batch):
        x, y = batch
        return F.cross_entropy(s.m(x), y)

    def fit(s):
        for e in s.run.epochs(2):
            for batch in s.run.train(s.b):
                s.run.step(s.training_step(batch))


def main(run):
    t = Trainer(run)
    errors = []

    def work():
        try:
            t.fit()
        except BaseException as x:
            errors.append(x)

    th = threading.Thread(target=work)
    th.start()
    th.join()
    if errors:
        raise errors[0]
    done(run, t.m)


go(main)
