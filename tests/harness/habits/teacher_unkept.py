"""Mean teacher: deepcopy, EMA once a step, used in the loss; the user forgets run.keep."""

from kit import *


def main(run):
    m = run.model(mlp())
    t = copy.deepcopy(m).requires_grad_(False)
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    for e in run.epochs(3):
        for x, y in run.train(b):
            with torch.no_grad():
                target = t(x).softmax(1)
            out = m(x)
            if run.step(F.cross_entropy(out, y) + F.mse_loss(out.softmax(1), target)):
                with torch.no_grad():
                    for p, q in zip(t.parameters(), m.parameters()):
                        p.mul_(0.9).add_(q, alpha=0.1)
    done(run, m)


go(main)
