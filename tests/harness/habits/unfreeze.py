"""Gradual unfreezing: the body learns from epoch 1 on."""

STRATEGIES = ["zero", "fsdp"]
NO_PLAIN = 1

from kit import *


def main(run):
    m = run.model(mlp())
    m[0].requires_grad_(False)
    o = run.optimizer(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        if e == 1:
            m[0].requires_grad_(True)
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
