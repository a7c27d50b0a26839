"""A little event scheduler: callbacks are pushed to a heap for `now + 9`, and change the settings when they are due.

State: Clock.now and Clock.heap. Shows at the 10th body, and every 9 bodies."""

KILL = 8

import heapq

from kit import *


class Clock:
    def __init__(s):
        s.now, s.heap = 0, []

    def later(s, delay, f):
        heapq.heappush(s.heap, (s.now + delay, id(f), f))

    def tick(s):
        s.now += 1
        while s.heap and s.heap[0][0] <= s.now:
            heapq.heappop(s.heap)[2]()


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    clock, settings = Clock(), {"smoothing": 0.0}

    def raise_smoothing():
        settings["smoothing"] += 0.05
        clock.later(9, raise_smoothing)

    clock.later(9, raise_smoothing)
    for e in run.epochs(1):
        for x, y in run.train(b):
            clock.tick()
            run.step(F.cross_entropy(m(x), y, label_smoothing=settings["smoothing"]))
    done(run, m)


go(main)
