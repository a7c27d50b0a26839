"""Lottery ticket: weights go back to those of the beginning after an epoch, times masks that are buffers in a hook."""

KILL = 8
STRATEGIES = ["zero"]

from kit import *


class Masked(nn.Module):
    def __init__(s, a, b):
        super().__init__()
        s.l = nn.Linear(a, b)
        s.register_buffer("mask", torch.ones(b, a))

    def forward(s, x):
        return F.linear(x, s.l.weight * s.mask, s.l.bias)


def main(run):
    m = run.model(nn.Sequential(Masked(6, 8), nn.Tanh(), Masked(8, 3)))
    first = copy.deepcopy(m.state_dict())
    o = run.optimizer(sgd(m))
    b = run.loader(data(48), global_batch=16, micro_batch=4)
    for e in run.epochs(4):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        if e == 0:
            masks = {
                n + ".mask": (l.l.weight.abs() > l.l.weight.abs().median()).float()
                for n, l in m.named_children()
                if hasattr(l, "mask")
            }
            m.load_state_dict({**first, **masks})
    done(run, m)


go(main)
