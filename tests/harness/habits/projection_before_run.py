"""A fixed random projection (RND, random features) drawn at the top of the script, before Run begins."""

NO_PLAIN = 1

from kit import *

P = torch.randn(6, 3)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    for e in run.epochs(2):
        for x, _ in run.train(b):
            run.step(F.mse_loss(m(x), x @ P))
    done(run, m)


go(main)
