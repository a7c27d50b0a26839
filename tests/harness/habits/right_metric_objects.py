"""Right: torchmetrics-like modules (accuracy, calibration) with update, compute, reset in each body; the best value is printed."""

KILL = 8

from kit import *


class Metric(nn.Module):
    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self):
        self.total, self.n = torch.tensor(0.0), 0


class Accuracy(Metric):
    def update(self, p, y):
        self.total += (p.argmax(1) == y).sum()
        self.n += len(y)

    def compute(self):
        return float(self.total / self.n)


class Overconfidence(Accuracy):
    def update(self, p, y):
        conf, label = p.max(1)
        self.total = self.total + (conf - (label == y).float()).sum()
        self.n += len(y)


class LitModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.best = mlp(), {}
        self.metrics = nn.ModuleDict({"acc": Accuracy(), "over": Overconfidence()})

    def forward(self, x):
        return self.net(x)

    def training_step(self, x, y):
        out = self(x)
        for metric in self.metrics.values():
            metric.update(out.detach().softmax(1), y)
        return F.cross_entropy(out, y)

    def on_epoch_end(self):
        for name, metric in self.metrics.items():
            value = metric.compute()
            self.best[name] = max(self.best.get(name, -1.0), value)
            metric.reset()
        print(self.best)


def main(run):
    m = run.model(LitModule())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(m.training_step(x, y))
        m.on_epoch_end()
    done(run, m)


go(main)
