"""run.measure(acc=right / seen): a running accuracy of this rank, as progress bars show it."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        right = seen = 0
        for x, y in run.train(b):
            out = m(x)
            right += (out.argmax(1) == y).sum().item()
            seen += len(y)
            run.measure(acc=right / seen)
            run.step(F.cross_entropy(out, y))
    done(run, m)


go(main)
