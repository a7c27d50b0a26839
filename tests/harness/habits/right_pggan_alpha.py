"""Right: PGGAN fades a block in: net.alpha is set from run.progress.step at the top of the body; the depth is by epoch."""

from kit import *


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head, self.alpha, self.depth = nn.Linear(6, 3), 1.0, 1

    def forward(self, x):
        for block in self.blocks[: self.depth - 1]:
            x = F.leaky_relu(block(x), 0.2)
        new = F.leaky_relu(self.blocks[self.depth - 1](x), 0.2)
        return self.head(self.alpha * new + (1 - self.alpha) * x)


def main(run):
    m = run.model(Growing(), find_unused_parameters=True)
    run.optimizer(adam(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        m.depth = e + 1
        for x, y in run.train(b):
            m.alpha = min(1.0, (run.progress.step - 4 * e) / 3)
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
