"""A parameter without gradient that the script sets once a step (bias of experts), the form of docs/script.md."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "pipeline", "hybrid@3", "parameter-server@3"]

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.a, s.b = nn.Linear(6, 8), nn.Linear(8, 3)
        s.bias = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(s, x):
        return s.b((s.a(x) + s.bias).tanh())


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)):
                with torch.no_grad():
                    m.bias.add_(0.01 * run.progress.step)
                    m.bias.copy_(m.bias * 0.9)
    done(run, m)


go(main)
