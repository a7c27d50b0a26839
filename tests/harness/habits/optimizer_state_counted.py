"""the optimizer's state is cleared at the end of every other epoch, counted"""

KILL = 8

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3)))
    n = 0
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(4):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        n += 1
        if n % 2 == 0:
            o.state.clear()
    done(run, m)


go(main)
