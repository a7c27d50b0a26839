"""DANN: the autograd.Function of the reversal counts its backward passes in the class, and reverses after 18."""

KILL = 8

from kit import *


class Reverse(torch.autograd.Function):
    passes = 0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        Reverse.passes += 1
        return -g * (0.2 if Reverse.passes > 18 else 0.0)


def main(run):
    m = run.model(nn.ModuleDict({"f": nn.Linear(6, 8), "c": nn.Linear(8, 3), "d": nn.Linear(8, 1)}))
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            f = m["f"](x).tanh()
            domain = (x[:, 0] > 0).float()
            run.step(
                F.cross_entropy(m["c"](f), y)
                + F.binary_cross_entropy_with_logits(m["d"](Reverse.apply(f)).squeeze(1), domain)
            )
    done(run, m)


go(main)
