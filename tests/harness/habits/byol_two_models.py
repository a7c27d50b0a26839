"""BYOL, and the target network is a model of the run, too."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2"]

from kit import *


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def main(run):
    n = net()
    t = run.model(copy.deepcopy(n).requires_grad_(False))
    m = run.model(n)
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, _ in run.train(b):
            with torch.no_grad():
                z = t(x + 0.1 * torch.randn_like(x))
            if run.step(-F.cosine_similarity(m(x), z).mean()):
                with torch.no_grad():
                    for p, q in zip(t.parameters(), m.parameters()):
                        p.lerp_(q, 0.1)
    done(run, m, t)


go(main)
