"""`if i % 10 == 0: run.log(loss=loss.item())` in the body, i counted by enumerate; 3 ranks have unequal numbers."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    for e in run.epochs(2):
        for i, (x, y) in enumerate(run.train(b)):
            loss = F.cross_entropy(m(x), y)
            run.step(loss)
            if i % 5 == 0:
                run.log(now=loss.item())
    done(run, m)


go(main)
