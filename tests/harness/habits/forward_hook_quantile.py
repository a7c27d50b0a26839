"""Wrong: a forward hook holds the running maximum of activations in a closure, and clips them after 30 calls."""

KILL = 8

from kit import *


def clipper(start=30, decay=0.9):
    peak, calls = torch.zeros(1), 0

    def hook(module, args, out):
        nonlocal peak, calls
        calls += 1
        peak = torch.maximum(peak * decay, out.detach().abs().max())
        return out if calls < start else out.clamp(-0.7 * peak.item(), 0.7 * peak.item())

    return hook


def main(run):
    m = run.model(mlp())
    m[0].register_forward_hook(clipper())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
