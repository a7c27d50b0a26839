"""Multi-task: the head is chosen by the micro-batch's content; a head may be unused in a whole step; AdamW."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "parameter-server@3"]

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.body = nn.Linear(6, 8)
        s.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(6))

    def forward(s, x):
        return s.heads[int(x[0, 0].abs() * 3) % 6](s.body(x).tanh())


def main(run):
    m = run.model(Net(), find_unused_parameters=True)
    o = run.optimizer(torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.3))
    b = run.loader(data(), global_batch=8, micro_batch=2)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
