"""Early-learning regularisation: a memory of targets for each sample, a plain tensor of the loss."""

from kit import *


class Elr:
    def __init__(s):
        s.targets = torch.zeros(40, 3)

    def __call__(s, out, y, i):
        p = out.softmax(1)
        s.targets[i] = 0.7 * s.targets[i] + 0.3 * p.detach()
        return F.cross_entropy(out, y) + (1 - (s.targets[i] * p).sum(1)).log().mean()


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    elr = Elr()
    b = run.loader((*data(), torch.arange(40)), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y, i in run.train(b):
            run.step(elr(m(x), y, i))
    done(run, m)


go(main)
