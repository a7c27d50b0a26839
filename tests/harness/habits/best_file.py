"""The best weights by a metric of all ranks go to best.pt, and are loaded at the end; the best value is not kept."""

KILL = 11

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, lr=1.5))
    best = float("inf")
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    v = run.loader(data(32), global_batch=16, micro_batch=4, shuffle=False)
    path = "best.pt"
    for e in run.epochs(5):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        for x, y in run.evaluate(v):
            run.measure(val=F.cross_entropy(m(x), y, reduction="none"))
        if run.metrics["val"] < best:
            best = run.metrics["val"]
            torch.save(m.state_dict(), path)
    run.barrier()
    m.load_state_dict(torch.load(path))
    done(run, m)


go(main)
