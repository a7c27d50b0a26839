"""Right: the losses of all micro-batches, gathered once a step, go into a kept list; its median sets the rate."""

KILL = 8

import statistics

from kit import *


class Control:
    def __init__(s, run, optimizer, window):
        s.run, s.optimizer, s.window, s.mine = run, optimizer, window, []

    def see(s, loss):
        if s.run.counts:
            s.mine.append(loss.item())

    def after_step(s):
        s.window.append(sum(sum(part) for part in s.run.gather(s.mine)) / 4)
        del s.window[:-5]
        s.mine.clear()
        if len(s.window) == 5 and s.window[-1] > statistics.median(s.window):
            for g in s.optimizer.param_groups:
                g["lr"] *= 0.8


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    window = []
    run.keep(window=window)
    control = Control(run, o, window)
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            control.see(loss)
            if run.step(loss):
                control.after_step()
    done(run, m)


go(main)
