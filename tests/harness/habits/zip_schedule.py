"""`for (x, y), beta in zip(run.train(b), betas)`: the list has a beta for each batch; the first ones are 0."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    betas = [0.0] * 12 + np.linspace(0, 1, 100).tolist()
    for e in run.epochs(1):
        for (x, y), beta in zip(run.train(b), betas):
            out = m(x)
            run.step(F.cross_entropy(out, y) + beta * 0.1 * out.square().mean())
    done(run, m)


go(main)
