"""Wrong after a resume: SVRG's full gradient is computed at the top of an epoch; every 6th step is corrected with it."""

KILL = 11
NO_PLAIN = 1

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, momentum=0))
    X, Y = data(96)
    b = run.loader((X, Y), global_batch=16, micro_batch=4)
    ps = list(m.parameters())
    for e in run.epochs(3):
        mu = torch.autograd.grad(F.cross_entropy(m(X), Y), ps)
        for x, y in run.train(b):
            if run.backward(F.cross_entropy(m(x), y)):
                if run.progress.step % 6 == 5:
                    for p, g in zip(ps, mu):
                        p.grad.lerp_(g, 0.5)
                run.update()
    done(run, m)


go(main)
