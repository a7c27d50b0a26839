"""Right: the loads of all ranks (run.sum) move the balance bias once a step; the count begins at zero each step."""

KILL = 8

from kit import *


class Moe(nn.Module):
    def __init__(s, k=4):
        super().__init__()
        s.gate, s.experts = nn.Linear(6, k, bias=False), nn.ModuleList(nn.Linear(6, 3) for _ in range(k))
        s.bias = nn.Parameter(torch.zeros(k), requires_grad=False)

    def forward(s, x):
        scores = s.gate(x).sigmoid()
        pick = (scores + s.bias).argmax(1)
        hot = F.one_hot(pick, len(s.experts))
        return (torch.stack([f(x) for f in s.experts], 1) * (hot * scores).unsqueeze(2)).sum(1), hot.sum(0)


def main(run):
    m = run.model(Moe())
    o = run.optimizer(sgd(m))
    load = torch.zeros(4)
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            out, picked = m(x)
            if run.counts:
                load += picked
            if run.step(F.cross_entropy(out, y)):
                total = run.sum(load)
                with torch.no_grad():
                    m.bias += 0.05 * (total.mean() - total).sign()
                load.zero_()
    done(run, m)


go(main)
