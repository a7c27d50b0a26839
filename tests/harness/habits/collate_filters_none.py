"""A collate function that leaves out samples that could not be read."""

from kit import *


class Ds(Dataset):
    def __init__(s):
        s.x, s.y = data()

    def __len__(s):
        return 40

    def __getitem__(s, i):
        return None if i % 7 == 3 else (s.x[i], s.y[i])


def collate(batch):
    return default_collate([s for s in batch if s is not None])


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(Ds(), global_batch=16, micro_batch=4, collate_fn=collate)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
