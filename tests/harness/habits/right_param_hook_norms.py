"""Right: hooks of parameters' gradients append norms to lists by name, printed at the end."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)
    norms = collections.defaultdict(list)
    for name, p in m.named_parameters():
        p.register_hook(lambda g, name=name: norms[name].append(g.norm().item()))
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    print({k: max(v) for k, v in norms.items()})
    done(run, m)


go(main)
