"""Weights of classes from the recall on a validation set (run.sum), into a new CrossEntropyLoss at the end of each epoch."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    v = run.loader((numbers(32, 6, seed=8), classes(32, seed=9)), global_batch=16, micro_batch=4, shuffle=False)
    criterion = nn.CrossEntropyLoss(reduction="none")
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(criterion(m(x), y).mean())
        hits = torch.zeros(3, 2)
        for x, y in run.evaluate(v):
            right = (m(x).argmax(1) == y).float()
            if run.counts:
                hits[:, 0] += F.one_hot(y, 3).float().T @ right
                hits[:, 1] += F.one_hot(y, 3).float().sum(0)
        hits = run.sum(hits)
        recall = hits[:, 0] / hits[:, 1].clamp(min=1)
        criterion = nn.CrossEntropyLoss(weight=1.5 - recall, reduction="none")
    done(run, m)


go(main)
