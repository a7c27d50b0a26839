"""OHEM: only losses above the running loss count; it lies in a memoryview of a bytearray. (In place of ohem_memoryview.)

State: bytes of a bytearray, written through a memoryview cast to doubles in each body. Shows at once."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    cells = memoryview(bytearray(8)).cast("d")
    cells[0] = 1.0
    for e in run.epochs(1):
        for x, y in run.train(b):
            losses = F.cross_entropy(m(x), y, reduction="none")
            cells[0] = 0.9 * cells[0] + 0.1 * float(losses.detach().mean())
            hard = (losses.detach() > cells[0]).float()
            run.step((hard * losses).sum() / hard.sum().clamp(min=1))
    done(run, m)


go(main)
