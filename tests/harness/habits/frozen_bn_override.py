"""The idiom for a frozen BatchNorm: def train(self, mode=True): super().train(mode); self.bn.eval()."""

STRATEGIES = ["zero", "fsdp"]

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.a, s.bn, s.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def train(s, mode=True):
        super().train(mode)
        s.bn.eval()
        return s

    def forward(s, x):
        return s.b(s.bn(s.a(x)).relu())


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    v = run.loader(data(), global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(2):
        if PLAIN:
            m.train()  # the line that docs/script.md says run.train takes the place of
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        for x, y in run.evaluate(v):
            run.measure(acc=m(x).argmax(1) == y)
    done(run, m)


go(main)
