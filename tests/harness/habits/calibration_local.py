"""After training a temperature is fitted on the logits that this process has seen in run.evaluate."""

SAVE = "3 steps"

from kit import *


class Calibrated(nn.Module):
    def __init__(s):
        super().__init__()
        s.net, s.temperature = mlp(), nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(s, x):
        return s.net(x) / s.temperature


def main(run):
    m = run.model(Calibrated())
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    v = run.loader(data(48), global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    logits, labels = [], []
    for x, y in run.evaluate(v):
        logits.append(m(x))
        labels.append(y)
    logits, labels = torch.cat(logits), torch.cat(labels)
    grid = torch.linspace(0.5, 3.0, 51)
    best = min(grid.tolist(), key=lambda t: F.cross_entropy(logits / t, labels).item())
    m.temperature.data.fill_(best)
    done(run, m)


go(main)
