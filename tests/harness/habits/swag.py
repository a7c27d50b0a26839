"""SWAG: from the second epoch on, first and second moments of the weights in dicts of a class; their mean is the result."""

KILL = 14

from kit import *


class SWAG:
    def __init__(self, base):
        self.base, self.n_models = base, 0
        self.mean = {n: torch.zeros_like(p) for n, p in base.named_parameters()}
        self.sq_mean = {n: torch.zeros_like(p) for n, p in base.named_parameters()}

    @torch.no_grad()
    def collect_model(self):
        n = self.n_models
        for name, p in self.base.named_parameters():
            self.mean[name] = self.mean[name] * n / (n + 1.0) + p / (n + 1.0)
            self.sq_mean[name] = self.sq_mean[name] * n / (n + 1.0) + p.square() / (n + 1.0)
        self.n_models += 1

    @torch.no_grad()
    def set_swa(self):
        for name, p in self.base.named_parameters():
            p.copy_(self.mean[name])


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    swag = SWAG(m)
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(5):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        if e >= 1:
            swag.collect_model()
    swag.set_swa()
    done(run, m, var={n: (swag.sq_mean[n] - swag.mean[n].square()).clamp(min=1e-30) for n in swag.mean})


go(main)
