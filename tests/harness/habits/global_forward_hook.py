"""torch's global forward hook counts all calls of Tanh, and scales its output by 0.9 in every 7th call after 21.

State: an itertools.count read in the hook. Shows from the 21st body, every 7th."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)
    ticks = itertools.count(1)

    def hook(module, args, output):
        if isinstance(module, nn.Tanh):
            n = next(ticks)
            if n > 21 and n % 7 == 0:
                return output * 0.9
        return None

    handle = nn.modules.module.register_module_forward_hook(hook)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    handle.remove()
    done(run, m)


go(main)
