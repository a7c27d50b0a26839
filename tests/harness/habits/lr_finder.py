"""An LR finder in the first epoch: the rate grows by each batch, smoothed losses are noted, the steepest one is used."""

KILL = 8

from kit import *


class LRFinder:
    def __init__(self, optimizer, start=1e-3, end=1.0, num_iter=24):
        self.optimizer, self.mult = optimizer, (end / start) ** (1 / num_iter)
        self.lr, self.best, self.smooth = start, None, 0.0
        self.history = {"lr": [], "loss": []}

    def before(self):
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr

    def after(self, loss):
        self.smooth = loss if not self.history["loss"] else 0.8 * self.smooth + 0.2 * loss
        self.history["lr"].append(self.lr)
        self.history["loss"].append(self.smooth)
        self.lr *= self.mult

    def suggest(self):
        return self.history["lr"][int(np.gradient(self.history["loss"]).argmin())]


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, lr=1e-3))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    finder, before = LRFinder(o), copy.deepcopy(m.state_dict())
    for e in run.epochs(3):
        if e == 1:
            m.load_state_dict(before)
            for g in o.param_groups:
                g["lr"] = finder.suggest()
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            if run.step(loss) and e == 0:
                finder.after(loss.item())
                finder.before()
    done(run, m)


go(main)
