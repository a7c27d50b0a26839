"""Wrong after a resume: once a step the next validation batch comes from an endless generator; every 8th sets the lr."""

KILL = 8
NO_PLAIN = 1

from kit import *


def forever(loader):
    while True:
        yield from loader


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    val = forever(DataLoader(TensorDataset(*data(160)), batch_size=8))
    for e in run.epochs(1):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)):
                a, t = next(val)
                with torch.no_grad():
                    v = F.cross_entropy(m(a), t)
                if run.progress.step % 8 == 0:
                    o.param_groups[0]["lr"] = 0.1 / (1 + float(v))
    done(run, m)


go(main)
