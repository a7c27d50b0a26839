"""Only a resume: the curriculum remembers the last epoch's loss; better by any amount raises the level; the last epoch sees it."""

KILL = 17

from kit import *


class Curriculum:
    def __init__(self):
        self.level, self.last = 0, None

    def update(self, loss):
        if self.last is not None and loss < self.last:
            self.level += 1
        self.last = loss

    def mask(self, x):
        return (x.norm(dim=1) < (2.2, 3.0, 9.0)[min(self.level, 2)]).float()


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    cur = Curriculum()
    b = run.loader(data(160), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            ce = F.cross_entropy(m(x), y, reduction="none")
            run.step((cur.mask(x) * ce).mean())
        cur.update(run.metrics["loss"])
    done(run, m)


go(main)
