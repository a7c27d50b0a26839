"""EarlyStopping object with a counter and patience, by a metric of all ranks; not kept."""

KILL = 11

from kit import *


class EarlyStopping:
    def __init__(s, patience=2):
        s.patience, s.counter, s.best_score, s.early_stop = patience, 0, None, False

    def __call__(s, val_loss):
        score = -val_loss
        if s.best_score is None:
            s.best_score = score
        elif score < s.best_score + 0.2:
            s.counter += 1
            if s.counter >= s.patience:
                s.early_stop = True
        else:
            s.best_score, s.counter = score, 0


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    stopping = EarlyStopping(3)
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    v = run.loader(data(32), global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(8):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        for x, y in run.evaluate(v):
            run.measure(val=F.cross_entropy(m(x), y, reduction="none"))
        stopping(run.metrics["val"])
        if stopping.early_stop:
            break
    done(run, m)


go(main)
