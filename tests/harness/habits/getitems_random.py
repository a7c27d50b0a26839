"""A data set that reads whole batches (__getitems__) and augments them with numpy."""

from kit import *


class Noisy(Dataset):
    def __init__(s):
        s.x, s.y = data()

    def __len__(s):
        return 40

    def __getitem__(s, i):
        return s.__getitems__([i])[0]

    def __getitems__(s, idx):
        n = torch.from_numpy(np.random.randn(len(idx), 6)).float()
        return [(s.x[i] + 0.1 * n[k], s.y[i]) for k, i in enumerate(idx)]


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(Noisy(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
