"""Mixture of experts, balance without a loss: every fourth step a bias parameter moves by the loads of this rank."""

KILL = 8

from kit import *


class Moe(nn.Module):
    def __init__(s, k=4):
        super().__init__()
        s.gate, s.experts = nn.Linear(6, k, bias=False), nn.ModuleList(nn.Linear(6, 3) for _ in range(k))
        s.bias = nn.Parameter(torch.zeros(k), requires_grad=False)
        s.load = collections.Counter()

    def forward(s, x):
        scores = s.gate(x).sigmoid()
        pick = (scores + s.bias).argmax(1)
        s.load.update(pick.tolist())
        outs = torch.stack([f(x) for f in s.experts], 1)
        return (outs * (F.one_hot(pick, len(s.experts)) * scores).unsqueeze(2)).sum(1)

    @torch.no_grad()
    def rebalance(s, rate=0.05):
        load = torch.tensor([float(s.load[i]) for i in range(len(s.experts))])
        s.bias += rate * (load.mean() - load).sign()
        s.load.clear()


def main(run):
    m = run.model(Moe())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)) and run.progress.step % 4 == 0:
                m.rebalance()
    done(run, m)


go(main)
