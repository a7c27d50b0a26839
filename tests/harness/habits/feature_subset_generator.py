"""Only a resume: a generator of the experiment's own draws the next epoch's features at the end of each epoch; not kept."""

KILL = 17

from kit import *


class RandomSubspace:
    def __init__(self, dim, keep=4):
        self.rng, self.dim, self.keep = torch.Generator().manual_seed(7), dim, keep
        self.mask = torch.ones(dim)

    def redraw(self):
        self.mask = torch.zeros(self.dim)
        self.mask[torch.randperm(self.dim, generator=self.rng)[: self.keep]] = 1.0


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    space = RandomSubspace(6)
    b = run.loader(data(160), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x * space.mask), y))
        space.redraw()
    done(run, m)


go(main)
