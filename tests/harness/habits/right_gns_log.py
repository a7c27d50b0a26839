"""Right: the gradient noise scale (McCandlish) from norms of micro-batch gradients, in moving averages, only printed."""

from kit import *


class GNS:
    def __init__(self, beta=0.9):
        self.beta, self.small, self.big, self.acc = beta, None, None, None

    def micro(self, grads):
        flat = torch.cat([g.flatten() for g in grads])
        self.acc = flat if self.acc is None else self.acc + flat
        sq = float(flat.square().sum())
        self.small = sq if self.small is None else self.beta * self.small + (1 - self.beta) * sq

    def macro(self, n):
        sq = float((self.acc / n).square().sum())
        self.big = sq if self.big is None else self.beta * self.big + (1 - self.beta) * sq
        self.acc = None

    @property
    def ratio(self):
        return self.small / max(self.big, 1e-12)


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    gns = GNS()
    for e in run.epochs(2):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            gns.micro(torch.autograd.grad(loss, list(m.parameters()), retain_graph=True))
            if run.step(loss):
                gns.macro(4)
                print(f"step {run.progress.step}: noise scale {gns.ratio:.3f}")
    done(run, m)


go(main)
