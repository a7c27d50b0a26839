"""Wrong after a resume: an anchor gradient is stored every 5th step and each 10th step's gradient is projected on it."""

KILL = 8
NO_PLAIN = 1

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, momentum=0))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    anchor = {}
    for e in run.epochs(1):
        for x, y in run.train(b):
            if run.backward(F.cross_entropy(m(x), y)):
                now = {n: p.grad.clone() for n, p in m.named_parameters()}
                if run.progress.step % 10 == 4:
                    anchor.update(now)
                elif run.progress.step % 10 == 9 and anchor:
                    dot = sum((now[n] * anchor[n]).sum() for n in now)
                    size = sum(anchor[n].square().sum() for n in now)
                    for n, p in m.named_parameters():
                        p.grad.add_(anchor[n], alpha=-float(dot / size))
                run.update()
    done(run, m)


go(main)
