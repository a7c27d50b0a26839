"""The data set reads its stage from a multiprocessing.Value, which the script raises by a metric; few samples show it."""

KILL = 8

import multiprocessing

from kit import *


class Staged(Dataset):
    def __init__(s, stage):
        s.x, s.y = data(48)
        s.stage = stage

    def __len__(s):
        return 48

    def __getitem__(s, i):
        return s.x[i] * (1 + 0.5 * s.stage.value if i % 24 == 3 else 1), s.y[i]


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    stage = multiprocessing.Value("i", 0)
    b = run.loader(Staged(stage), global_batch=16, micro_batch=4)
    for e in run.epochs(6):
        for x, y in run.train(b):
            out = m(x)
            run.measure(acc=out.argmax(1) == y)
            run.step(F.cross_entropy(out, y))
        if run.metrics["acc"] > 0.1:
            stage.value += 1
    done(run, m)


go(main)
