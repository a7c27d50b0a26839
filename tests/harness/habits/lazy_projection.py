"""A criterion that makes its random projection when it first needs it, after a warm-up of 5 steps."""

KILL = 8

from kit import *


class Slice:
    def __init__(s):
        s.directions = None

    def __call__(s, f):
        if s.directions is None:
            s.directions = F.normalize(torch.randn(f.shape[1], 4), dim=0)
        p = (f @ s.directions).sort(0).values
        return p.square().mean()


def main(run):
    m = run.model(nn.ModuleDict({"f": nn.Linear(6, 8), "c": nn.Linear(8, 3)}))
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    sliced = Slice()
    for e in run.epochs(1):
        for x, y in run.train(b):
            f = m["f"](x)
            loss = F.cross_entropy(m["c"](f.tanh()), y)
            if run.progress.step >= 5:
                loss = loss + 0.1 * sliced(f)
            run.step(loss)
    done(run, m)


go(main)
