"""Early stopping by hand: best and bad are variables, best_state a deepcopy of state_dict(); loaded at the end."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, lr=0.5))
    b = run.loader(data(48), global_batch=16, micro_batch=4)
    v = run.loader((numbers(20, 6, seed=8), classes(20, seed=9)), global_batch=8, shuffle=False)
    best, bad, best_state = float("inf"), 0, None
    for e in run.epochs(6):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        for x, y in run.evaluate(v):
            run.measure(val=F.cross_entropy(m(x), y, reduction="none"))
        if run.metrics["val"] < best:
            best, bad, best_state = run.metrics["val"], 0, copy.deepcopy(m.state_dict())
        else:
            bad += 1
            if bad == 3:
                break
    m.load_state_dict(best_state)
    done(run, m)


go(main)
