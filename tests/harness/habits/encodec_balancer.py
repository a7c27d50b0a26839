"""EnCodec's Balancer: losses are scaled by moving averages of gradient norms at the output, in a closure (flashy.averager)."""

from kit import *


def averager(beta=1.0):
    fix, total = collections.defaultdict(float), collections.defaultdict(float)

    def _update(metrics, weight=1):
        nonlocal total, fix
        for key, value in metrics.items():
            total[key] = total[key] * beta + weight * float(value)
            fix[key] = fix[key] * beta + weight
        return {key: tot / fix[key] for key, tot in total.items()}

    return _update


class Balancer:
    def __init__(self, weights, ema_decay=0.9):
        self.weights, self.averager = weights, averager(ema_decay)

    def scaled(self, losses, out):
        norms = {}
        for name, loss in losses.items():
            (grad,) = torch.autograd.grad(loss, [out], retain_graph=True)
            norms[name] = grad.norm(p=2, dim=1).mean()
        avg = self.averager(norms)
        total = sum(self.weights.values())
        return sum(self.weights[n] / total / (1e-6 + avg[n]) * loss for n, loss in losses.items())


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
    run.optimizer(sgd(m, lr=0.02))
    b = run.loader(numbers(64, 6), global_batch=16, micro_batch=4)
    balancer = Balancer({"l1": 1.0, "l2": 2.0})
    for e in run.epochs(2):
        for x in run.train(b):
            out = m(x)
            run.step(balancer.scaled({"l1": F.l1_loss(out, x), "l2": F.mse_loss(out, x)}, out))
    done(run, m)


go(main)
