"""Right: a memory of earlier inputs is filled, but mixing with it is off in the configuration."""

KILL = 8

from types import SimpleNamespace

from kit import *


def main(run):
    args = SimpleNamespace(mix_memory=False, alpha=0.2, log_every=5)
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    memory = collections.deque(maxlen=8)
    for e in run.epochs(2):
        for x, y in run.train(b):
            if args.mix_memory and len(memory) == 8:
                x = (1 - args.alpha) * x + args.alpha * memory[0][: len(x)]
            memory.append(x.detach())
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
