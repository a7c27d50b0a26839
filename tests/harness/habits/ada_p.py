"""StyleGAN-ADA: augment.p is raised every fourth step by the signs of this process's outputs since then."""

KILL = 8

from kit import *


class Augment:
    def __init__(s):
        s.p = 0.0

    def __call__(s, x):
        flip = (torch.rand(len(x), 1) < s.p).float()
        return x * (1 - 2 * flip)


def main(run):
    m = run.model(mlp(k=1))
    o = run.optimizer(sgd(m))
    augment, signs = Augment(), []
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            out = m(augment(x)).squeeze(1)
            signs.append(out.detach().sign().mean())
            if run.step(F.binary_cross_entropy_with_logits(out, (y > 0).float())) and run.progress.step % 4 == 0:
                rt = float(torch.stack(signs).mean())
                augment.p = min(1.0, max(0.0, augment.p + 0.2 * rt))
                signs.clear()
    done(run, m)


go(main)
