"""Wrong: post-accumulate-grad hooks count and, after 60 calls, shrink gradients (a home-made gradient decay)."""

KILL = 8

from kit import *


class Decay:
    def __init__(s, after=60):
        s.n, s.after = 0, after

    def __call__(s, p):
        s.n += 1
        if s.n > s.after:
            p.grad.mul_(0.5)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    d = Decay()
    for p in m.parameters():
        p.register_post_accumulate_grad_hook(d)
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
