"""accum = 8 // int(os.environ['WORLD_SIZE']), left over from a script for DDP: the loss is divided by it."""

NO_KILL = 1

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    accum = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    for e in run.epochs(2):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y) / accum
            run.step(loss)
    done(run, m)


go(main)
