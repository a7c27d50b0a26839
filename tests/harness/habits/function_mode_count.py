"""Wrong: a TorchFunctionMode counts calls of F.linear, and quantises the outputs of linear layers after 100 calls."""

KILL = 8

from kit import *
from torch.overrides import TorchFunctionMode


class QuantiseLater(TorchFunctionMode):
    def __init__(s, after):
        super().__init__()
        s.after, s.calls = after, 0

    def __torch_function__(s, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is F.linear:
            s.calls += 1
            if s.calls > s.after:
                out = out + (out.detach() * 8).round() / 8 - out.detach()
        return out


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    quantise = QuantiseLater(100)
    for e in run.epochs(1):
        for x, y in run.train(b):
            with quantise:
                out = m(x)
            run.step(F.cross_entropy(out, y))
    done(run, m)


go(main)
