"""Anomaly detection: after the loop a threshold parameter is the 95 % quantile of this process's scores."""

NO_KILL = 1

from kit import *


class Auto(nn.Module):
    def __init__(s):
        super().__init__()
        s.net = mlp(k=6)
        s.threshold = nn.Parameter(torch.zeros(()), requires_grad=False)

    def score(s, x):
        return (s.net(x) - x).square().mean(1)


def main(run):
    m = run.model(Auto())
    o = run.optimizer(adam(m))
    x, _ = data(96)
    b = run.loader((x,), global_batch=16, micro_batch=4)
    v = run.loader((x,), global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(1):
        for (xs,) in run.train(b):
            run.step(m.score(xs).mean())
    scores = []
    for (xs,) in run.evaluate(v):
        scores += m.score(xs).tolist()
    with torch.no_grad():
        m.threshold.fill_(float(np.quantile(scores, 0.95)))
    done(run, m)


go(main)
