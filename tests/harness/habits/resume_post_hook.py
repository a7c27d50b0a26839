"""An optimizer's step post hook counts steps in a list, and from the 15th on shrinks the weights by 0.999. Not kept.

State: the list. The same on all ranks; wrong only after a kill at 8, and shows seven steps later."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(320), global_batch=16, micro_batch=4)
    steps = []

    @torch.no_grad()
    def shrink(optimizer, args, kwargs):
        steps.append(1)
        if len(steps) >= 15:
            for p in m.parameters():
                p.mul_(0.999)

    o.register_step_post_hook(shrink)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
