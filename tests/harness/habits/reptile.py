"""Reptile: before = deepcopy(state_dict()) at the top of an epoch, and after it before + 0.5 * (after - before)."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, momentum=0))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        before = copy.deepcopy(m.state_dict())
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        after = m.state_dict()
        m.load_state_dict({k: before[k] + 0.5 * (after[k] - before[k]) for k in before})
    done(run, m)


go(main)
