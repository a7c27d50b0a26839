"""Right: PointNet++'s momenta of BatchNorm and the rate, set from the number of the epoch at its top."""

from kit import *


def set_bn_momentum(model, epoch):
    momentum = max(0.5 * 0.5 ** (epoch // 1), 0.01)

    def fn(module):
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = momentum

    model.apply(fn)
    return momentum


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        momentum = set_bn_momentum(m, e)
        lr = max(0.1 * 0.7**e, 1e-5)
        for g in o.param_groups:
            g["lr"] = lr
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        run.say(f"epoch {e}: momentum {momentum}, lr {lr}")
    done(run, m)


go(main)
