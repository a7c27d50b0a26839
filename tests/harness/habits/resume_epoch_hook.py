"""Between epochs an object counts, and from its 3rd epoch on resets the head; not kept; killed in the 2nd."""

KILL = 11

from kit import *


class Resetter:
    n = 0

    @torch.no_grad()
    def epoch_end(s, m):
        s.n += 1
        if s.n == 3:
            m[2].bias.zero_()


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    reset = Resetter()
    for e in run.epochs(4):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        reset.epoch_end(m)
    done(run, m)


go(main)
