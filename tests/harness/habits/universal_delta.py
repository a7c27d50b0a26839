"""A universal adversarial perturbation: delta is grown in each body (.data), and used from step 6 on."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    delta = torch.zeros(6, requires_grad=True)
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            (g,) = torch.autograd.grad(F.cross_entropy(m(x + delta), y), delta)
            delta.data = (delta.data + 0.05 * g.sign()).clamp_(-0.3, 0.3)
            inputs = x + delta.detach() if run.progress.step >= 6 else x
            run.step(F.cross_entropy(m(inputs), y))
    done(run, m)


go(main)
