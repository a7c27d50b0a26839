"""A kept teacher moves by `q.mul_(tau).add_(p, ...)` at the end of an epoch, and tau is a variable of the script."""

KILL = 8

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3)))
    target = copy.deepcopy(m).requires_grad_(False).eval()
    run.keep(target=target)
    tau = 0.2
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(4):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y) + F.mse_loss(m(x), target(x)))
        with torch.no_grad():
            for q, p in zip(target.parameters(), m.parameters()):
                q.mul_(tau).add_(p, alpha=1 - tau)
        tau = tau + 0.3 * (1 - tau)
    done(run, m)


go(main)
