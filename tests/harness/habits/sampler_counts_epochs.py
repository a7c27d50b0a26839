"""A curriculum sampler that counts its passes (self.epoch += 1 in __iter__) and begins to widen after three."""

KILL = 8
NO_PLAIN = 1

from kit import *


class Curriculum:
    def __init__(s):
        s.epoch = 0

    def __len__(s):
        return 24

    def __iter__(s):
        s.epoch += 1
        return iter((torch.randperm(24) + (16 if s.epoch > 5 else 0)).tolist())


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), sampler=Curriculum(), global_batch=8, micro_batch=2)
    for e in run.epochs(6):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
