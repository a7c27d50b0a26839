"""One head of a ModuleDict for each task; the task alternates by step; momentum and weight decay."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2"]

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.body = nn.Linear(6, 8)
        s.heads = nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 3)})

    def forward(s, x, task):
        return s.heads[task](s.body(x).tanh())


def main(run):
    m = run.model(Net(), find_unused_parameters=True)
    o = run.optimizer(sgd(m, weight_decay=0.1))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x, "ab"[run.progress.step % 2]), y))
    done(run, m)


go(main)
