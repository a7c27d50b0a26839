"""tensor.register_hook puts the norm of the features' gradient into a deque; its median, once full, limits the gradient."""

KILL = 8

from kit import *


def main(run):
    m = run.model(nn.ModuleDict({"f": nn.Linear(6, 8), "c": nn.Linear(8, 3)}))
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    norms = collections.deque(maxlen=16)

    def limit(g):
        n = float(g.norm())
        if len(norms) == norms.maxlen:
            g = g * min(1.0, float(np.median(norms)) / n)
        norms.append(n)
        return g

    for e in run.epochs(1):
        for x, y in run.train(b):
            f = m["f"](x).tanh()
            f.register_hook(limit)
            run.step(F.cross_entropy(m["c"](f), y))
    done(run, m)


go(main)
