"""Control: BatchNorm, dropout, augmentation, short last step; must be equal."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2@3", "hsdp:shard=2@4"]

from kit import *


class Noisy(Dataset):
    def __init__(s):
        s.x, s.y = data(44)

    def __len__(s):
        return 44

    def __getitem__(s, i):
        return s.x[i] + torch.randn(6) * 0.1 + np.random.rand() * random.random(), s.y[i]


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3)))
    o = run.optimizer(adam(m))
    b = run.loader(Noisy(), global_batch=16, micro_batch=2)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        for x, y in run.evaluate(b):
            run.measure(acc=m(x).argmax(1) == y)
    done(run, m)


go(main)
