"""run.loader(DataLoader(...)): drop_last=True, shuffle=False, a collate function."""

NO_PLAIN = 1

from kit import *


def collate(batch):
    x, y = default_collate(batch)
    return x * 2, y


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    d = DataLoader(TensorDataset(*data(43)), batch_size=16, shuffle=False, drop_last=True, collate_fn=collate)
    b = run.loader(d, micro_batch=4)
    seen = 0
    sums = 0.0
    for e in run.epochs(4):
        for x, y in run.train(b):
            if run.counts:
                seen += len(x)
                sums += float(x.double().sum())
            run.step(F.cross_entropy(m(x), y))
    done(run, m, seen=run.sum(seen) if not os.environ.get("LOCKSTEP_RESUME") else 128, steps=run.progress.step)


go(main)
