"""global_step = itertools.count().__next__ handed to a loss object, which warms up its KL term after 16 calls."""

KILL = 8

from kit import *


class Elbo:
    def __init__(s, clock):
        s.clock = clock

    def __call__(s, mu, x):
        t = s.clock()
        beta = min(1.0, max(0.0, (t - 16) / 16))
        return F.mse_loss(mu, x) + beta * 0.1 * mu.square().mean()


def main(run):
    m = run.model(mlp(k=6))
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    elbo = Elbo(itertools.count().__next__)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(elbo(m(x), x))
    done(run, m)


go(main)
