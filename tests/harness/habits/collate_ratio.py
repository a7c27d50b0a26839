"""MLM: a collate object whose mask ratio rises after 20 batches (self.calls)."""

KILL = 8

from kit import *


class Mask:
    calls = 0

    def __call__(s, samples):
        x, y = default_collate(samples)
        s.calls = s.calls + 1
        ratio = 0.1 if s.calls <= 20 else 0.4
        return x * (torch.rand(x.shape) > ratio), y


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    x, y = data(192)
    b = run.loader(list(zip(x, y)), global_batch=16, micro_batch=4, collate_fn=Mask())
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
