"""Wrong after a resume: scipy's Sobol points, one a step, choose dropout and noise of each 6th step."""

KILL = 8

from kit import *
from scipy.stats import qmc


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    sobol = qmc.Sobol(2, seed=3)
    p, noise = 0.0, 0.0
    for e in run.epochs(1):
        for x, y in run.train(b):
            if run.progress.step % 6 == 5:
                x = F.dropout(x + noise * torch.randn_like(x), p)
            if run.step(F.cross_entropy(m(x), y)):
                point = sobol.random(1)[0]
                if run.progress.step % 6 == 5:
                    p, noise = 0.5 * float(point[0]), 0.3 * float(point[1])
                else:
                    p, noise = 0.0, 0.0
    done(run, m)


go(main)
