"""FixMatch: two loaders side by side, weak and strong augmentation, pseudo-labels above a threshold, EMA kept."""

NO_PLAIN = 1
STRATEGIES = ["zero", "fsdp", "zero:stage=2"]

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    o = run.optimizer(sgd(m))
    sch = run.scheduler(torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=12))
    l = run.loader(data(24), global_batch=8, micro_batch=2)
    u = run.loader(numbers(72, 6), global_batch=24, micro_batch=6)
    for e in run.epochs(4):
        for (x, y), w in run.train(l, u):
            with torch.no_grad():
                p, t = m(w + 0.1 * torch.randn_like(w)).softmax(1).max(1)
            run.step(
                F.cross_entropy(m(x), y)
                + (F.cross_entropy(m(w + torch.randn_like(w)), t, reduction="none") * (p > 0.4)).mean()
            )
    done(run, m)


go(main)
