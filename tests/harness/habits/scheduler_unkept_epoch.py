"""StepLR stepped by hand at the end of each epoch, neither registered nor kept."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    s = torch.optim.lr_scheduler.StepLR(o, 2, 0.1)
    for e in run.epochs(4):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        s.step()
    done(run, m, lr=o.param_groups[0]["lr"])


go(main)
