"""DeepCluster: at the top of each epoch k-means over all features gives the labels; a fresh head is not made."""

KILL = 8

from kit import *


def kmeans(x, k=3, iterations=10):
    centers = x[:k].clone()
    for _ in range(iterations):
        assign = torch.cdist(x, centers).argmin(1)
        centers = torch.stack([x[assign == j].mean(0) if (assign == j).any() else centers[j] for j in range(k)])
    return assign


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m, lr=0.5))
    x_all = numbers(64, 6)
    b = run.loader((x_all, torch.arange(64)), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        with torch.no_grad():
            labels = kmeans(m[:2](x_all))
        for x, i in run.train(b):
            run.step(F.cross_entropy(m(x), labels[i]))
    done(run, m)


go(main)
