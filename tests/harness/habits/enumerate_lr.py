"""`for i, batch in enumerate(...): if (i + 1) % 8 == 0: lr *= 0.5`, counted in iterations."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for i, (x, y) in enumerate(run.train(b)):
            run.step(F.cross_entropy(m(x), y))
            if (i + 1) % 4 == 0:
                for g in o.param_groups:
                    g["lr"] *= 0.5
    done(run, m, lr=o.param_groups[0]["lr"])


go(main)
