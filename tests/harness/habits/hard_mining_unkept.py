"""order= by the losses of the last epoch (hard examples first); the tensor of losses is not kept; a resume begins an epoch."""

KILL = 8
SAVE = "1 epochs"

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    d = data(48)
    hard = torch.arange(48.0)
    b = run.loader(d, order=lambda e, g: hard.argsort(descending=True)[:32], global_batch=16, micro_batch=4)
    v = run.loader(d, global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(5):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        mine = []
        for x, y in run.evaluate(v):
            l = F.cross_entropy(m(x), y, reduction="none")
            if run.counts:
                mine.append(l)
        hard.copy_(torch.cat([t for part in run.gather(mine) for t in part]))
    done(run, m)


go(main)
