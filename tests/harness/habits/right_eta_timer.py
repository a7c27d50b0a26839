"""Right: a timer with an estimate of the time left, a moving average of the loss on the screen, slow steps listed."""

KILL = 8

import datetime

from kit import *


class Timer:
    def __init__(s, total):
        s.total, s.start, s.last, s.done, s.slow, s.smooth = total, time.time(), time.time(), 0, [], None

    def tick(s, loss):
        now = time.time()
        if now - s.last > 0.01:
            s.slow.append((s.done, now - s.last))
        s.last = now
        s.done += 1
        s.smooth = loss if s.smooth is None else 0.9 * s.smooth + 0.1 * loss
        left = datetime.timedelta(seconds=int((now - s.start) / s.done * (s.total - s.done)))
        return f"{s.done}/{s.total} {s.smooth:.3f} eta {left}"


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    timer = Timer(2 * 12 * 4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            line = timer.tick(loss.item())
            if timer.done % 10 == 0:
                print(line, end="\r")
            run.step(loss)
        print(f"{len(timer.slow)} slow steps")
    done(run, m)


go(main)
