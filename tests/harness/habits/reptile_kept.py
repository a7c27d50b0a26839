"""Reptile, as the message of a resume advises: the weights before an epoch are run.kept.before."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, momentum=0))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    run.keep(before={})
    for e in run.epochs(3):
        run.kept.before = copy.deepcopy(dict(m.state_dict()))
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        after, before = m.state_dict(), run.kept.before
        m.load_state_dict({k: before[k] + 0.5 * (after[k] - before[k]) for k in before})
    done(run, m)


go(main)
