"""Early stopping by hand, as the message of a resume advises: best, bad and best_state are kept."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, lr=0.5))
    b = run.loader(data(48), global_batch=16, micro_batch=4)
    v = run.loader((numbers(20, 6, seed=8), classes(20, seed=9)), global_batch=8, shuffle=False)
    run.keep(best=float("inf"), bad=0, best_state={})
    for e in run.epochs(6):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        for x, y in run.evaluate(v):
            run.measure(val=F.cross_entropy(m(x), y, reduction="none"))
        if run.metrics["val"] < run.kept.best:
            run.kept.best, run.kept.bad, run.kept.best_state = (
                run.metrics["val"],
                0,
                copy.deepcopy(dict(m.state_dict())),
            )
        else:
            run.kept.bad += 1
            if run.kept.bad == 3:
                break
    m.load_state_dict(run.kept.best_state)
    done(run, m)


go(main)
