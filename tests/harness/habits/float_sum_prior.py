"""Distribution alignment: run.sum of a float sum of probabilities over an epoch is the prior of the next one, and is kept."""

NO_KILL = 1

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    prior = torch.full((3,), 1 / 3)
    run.keep(prior=prior)
    for e in run.epochs(4):
        total = torch.zeros(3)
        for x, y in run.train(b):
            out = m(x)
            if run.counts:
                total += out.detach().softmax(1).sum(0)
            run.step(F.cross_entropy(out + prior.log(), y))
        total = run.sum(total)
        prior.copy_(total / total.sum())
    done(run, m, prior=prior)


go(main)
