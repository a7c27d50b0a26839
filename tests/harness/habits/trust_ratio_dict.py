"""An own LARS whose trust ratios are smoothed in a dict of the optimizer by id(p), not in its state."""

KILL = 8

from kit import *


class SmoothLARS(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, beta=0.8):
        super().__init__(params, {"lr": lr, "beta": beta})
        self.ratios = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                ratio = float((p.norm() + 1e-3) / (p.grad.norm() + 1e-3))
                old = self.ratios.get(id(p), ratio)
                self.ratios[id(p)] = group["beta"] * old + (1 - group["beta"]) * ratio
                p.add_(p.grad, alpha=-group["lr"] * min(self.ratios[id(p)], 5.0))


def main(run):
    m = run.model(mlp())
    run.optimizer(SmoothLARS(m.parameters()))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
