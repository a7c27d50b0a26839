"""A binarised network as its authors wrote it: weight.org, weight.data = sign(weight.org) in forward; restored around the step."""

STRATEGIES = ["zero", "fsdp"]

from kit import *


class Bin(nn.Linear):
    def forward(s, x):
        if not hasattr(s.weight, "org"):
            s.weight.org = s.weight.data.clone()
        s.weight.data = s.weight.org.sign()
        return F.linear(x, s.weight, s.bias)


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Bin(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            last = run.backward(F.cross_entropy(m(x), y))
            if last:
                for p in m.parameters():
                    if hasattr(p, "org"):
                        p.data.copy_(p.org)
            if run.update():
                for p in m.parameters():
                    if hasattr(p, "org"):
                        p.org.copy_(p.data.clamp_(-1, 1))
    done(run, m)


go(main)
