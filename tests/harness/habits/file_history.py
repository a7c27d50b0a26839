"""Wrong: losses are appended to a log file, which is read again every 4th step to scale the loss by its recent trend."""

KILL = 8

from kit import *


def trend(path):
    with open(path) as f:
        last = [float(line) for line in f][-12:]
    return float(np.clip(np.polyfit(np.arange(len(last)), last, 1)[0] * 5, -0.5, 0.5)) if len(last) == 12 else 0.0


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    log = open("losses.txt", "w")
    for e in run.epochs(1):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            print(loss.item(), file=log, flush=True)
            if run.progress.step % 4 == 3 and run.progress.step > 4:
                loss = loss * (1 - trend("losses.txt"))
            run.step(loss)
    done(run, m)


go(main)
