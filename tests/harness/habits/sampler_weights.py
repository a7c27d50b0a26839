"""A WeightedRandomSampler whose weights are set by an epoch's losses of all samples (gathered); not kept."""

NO_PLAIN = 1
KILL = 11
SAVE = "1 epochs"

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    d = data(48)
    sampler = torch.utils.data.WeightedRandomSampler(torch.ones(48), 48)
    b = run.loader(d, sampler=sampler, global_batch=16, micro_batch=4)
    v = run.loader(d, global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(5):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        if e == 1:
            mine = []
            for x, y in run.evaluate(v):
                if run.counts:
                    mine.append(F.cross_entropy(m(x), y, reduction="none"))
            sampler.weights = torch.cat([t for part in run.gather(mine) for t in part]).double()
    done(run, m)


go(main)
