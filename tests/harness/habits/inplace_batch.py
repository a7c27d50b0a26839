"""The body normalises and augments its batch in place; tensors, shuffle=False, and unfolded windows."""

STRATEGIES = ["zero", "fsdp"]

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    x0, y0 = data()
    b = run.loader((x0, y0), global_batch=16, micro_batch=2, shuffle=False)
    w = run.loader((numbers(45).unfold(0, 6, 1), y0), global_batch=16, micro_batch=2, shuffle=False)
    for e in run.epochs(2):
        for x, y in run.train(b):
            x.sub_(x.mean(0)).add_(torch.randn_like(x), alpha=0.1)
            run.step(F.cross_entropy(m(x), y))
        for x, y in run.train(w):
            x.mul_(2)
            run.step(F.cross_entropy(m(x), y))
    done(run, m, x=x0)


go(main)
