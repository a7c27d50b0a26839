"""Tied output layer F.linear(h, self.e.weight), and a penalty on the looked-up rows; padding_idx."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "parameter-server@3", "hybrid@3", "pipeline"]

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.e, s.l = nn.Embedding(20, 6, padding_idx=0), nn.Linear(6, 6)

    def forward(s, i):
        return F.linear(s.l(s.e(i).mean(1)).tanh(), s.e.weight)


def main(run):
    m = run.model(Net())
    o = run.optimizer(adam(m))
    g = torch.Generator().manual_seed(1)
    b = run.loader(
        (torch.randint(0, 20, (40, 5), generator=g), torch.randint(0, 20, (40,), generator=g)),
        global_batch=16,
        micro_batch=4,
    )
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy, x, y)
    done(run, m)


go(main)
