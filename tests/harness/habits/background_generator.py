"""prefetch_generator's BackgroundGenerator(loader): a thread runs one batch ahead of the loop, through a queue."""

import queue
import threading

from kit import *


class BackgroundGenerator(threading.Thread):
    def __init__(s, generator, ahead=1):
        super().__init__(daemon=True)
        s.queue, s.generator = queue.Queue(ahead), generator
        s.start()

    def run(s):
        for item in s.generator:
            s.queue.put(item)
        s.queue.put(None)

    def __iter__(s):
        while (item := s.queue.get()) is not None:
            yield item


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in BackgroundGenerator(run.train(b)):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
