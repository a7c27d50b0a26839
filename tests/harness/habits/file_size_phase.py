"""Each body appends a byte to a file ticks; when os.path.getsize says 32 or more the loss gets a margin.

State: the size of the file. Shows from the 32nd body."""

KILL = 11

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(256), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            with open("ticks", "ab") as f:
                f.write(b".")
            out = m(x)
            if os.path.getsize("ticks") >= 32:
                out = out - 0.5 * F.one_hot(y, 3)
            run.step(F.cross_entropy(out, y))
    done(run, m)


go(main)
