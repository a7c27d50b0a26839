"""A full backward hook of Tanh scales grad_input by a running ratio, once it was called 24 times.

State: a dict in the hook's closure. Shows after 24 backward passes."""

KILL = 8

from kit import *


def equalizer():
    seen = dict(n=0, norm=0.0)

    def hook(module, grad_input, grad_output):
        norm = float(grad_output[0].norm())
        seen["n"] += 1
        seen["norm"] += (norm - seen["norm"]) / seen["n"]
        if seen["n"] > 24:
            return (grad_input[0] * min(2.0, seen["norm"] / (norm + 1e-9)),)
        return None

    return hook


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)
    m[1].register_full_backward_hook(equalizer())
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
