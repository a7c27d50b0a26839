"""Snapshot ensemble: copies of the model in a list at the end of each cycle, averaged after training; not kept."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(48), global_batch=16, micro_batch=4)
    snapshots = []
    for e in run.epochs(4):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        snapshots.append(copy.deepcopy(m).eval())
    with torch.no_grad():
        p = torch.stack([s(numbers(10, 6, seed=9)).softmax(1) for s in snapshots]).mean(0)
    done(run, m, ensemble=p)


go(main)
