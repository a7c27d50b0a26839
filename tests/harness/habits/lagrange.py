"""Safe RL: a Lagrange multiplier rises once a step by the constraint's mean over all micro-batches; a tensor, not kept."""

KILL = 8

from kit import *


class Lagrange:
    def __init__(self, limit=0.2, lr=0.2):
        self.multiplier, self.limit, self.lr = torch.tensor(0.1), limit, lr

    def update(self, cost):
        self.multiplier = (self.multiplier + self.lr * (cost - self.limit)).clamp(min=0.0)


def main(run):
    pi = run.model(mlp(k=1))
    run.optimizer(adam(pi))
    b = run.loader(numbers(160, 6), global_batch=16, micro_batch=4)
    lagrange, costs = Lagrange(), []
    for e in run.epochs(1):
        for s in run.train(b):
            a = pi(s).tanh()
            reward, cost = -(a - 1).square().mean(), a.abs().mean()
            if run.counts:
                costs.append(cost.detach())
            if run.step((-reward + lagrange.multiplier * cost) / (1 + lagrange.multiplier)):
                lagrange.update(torch.stack([c for part in run.gather(costs) for c in part]).mean())
                costs.clear()
    done(run, pi)


go(main)
