"""Pseudo-labels, a kept tensor in a data set, are made anew where the loop is left by break, and it goes on."""

KILL = 8
NO_PLAIN = 1

from kit import *


class Labelled(Dataset):
    def __init__(self, x, soft):
        self.x, self.soft = x, soft

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.soft[i]


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m, lr=0.5))
    x, soft = numbers(96, 6), F.one_hot(classes(96), 3).float()
    run.keep(soft=soft)
    b = run.loader(Labelled(x, soft), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        more = True
        while more:
            more = False
            for xs, ys in run.train(b):
                if run.step(F.cross_entropy(m(xs), ys)) and run.progress.step % 2 == 0:
                    more = True
                    break
            with torch.no_grad():
                soft.mul_(0.7).add_(0.3 * m(x).softmax(1))
    done(run, m, soft=soft)


go(main)
