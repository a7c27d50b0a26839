"""torch._foreach_mul_ of all weights by a decaying factor at the end of the epoch"""

KILL = 8

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3)))
    decay = 0.5
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(4):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        with torch.no_grad():
            torch._foreach_mul_(list(m.parameters()), decay)
        decay = decay**0.5
    done(run, m)


go(main)
