"""Meta learning: an inner learning rate for each task, halved where the inner loss rises, from its third visit on."""

KILL = 8

from kit import *


class Inner:
    def __init__(s):
        s.lr, s.visits, s.last = {}, collections.Counter(), {}

    def adapt(s, w, x, y, task):
        s.visits[task] += 1
        lr = s.lr.setdefault(task, 0.4)
        before = F.mse_loss(x @ w, y)
        (g,) = torch.autograd.grad(before, w, create_graph=True)
        w2 = w - lr * g
        if s.visits[task] > 5:
            s.lr[task] = lr * (0.5 if before.item() > s.last[task] else 1.1)
        s.last[task] = before.item()
        return w2


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.w = nn.Parameter(torch.zeros(6))


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m, lr=0.02))
    inner, truth = Inner(), numbers(3, 6, seed=4)
    x, task = data(192)
    b = run.loader((x, task), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for xs, ts in run.train(b):
            t = int(ts[0])
            y = xs @ truth[t]
            w = inner.adapt(m.w, xs[:2], y[:2], t)
            run.step(F.mse_loss(xs[2:] @ w, y[2:]))
    done(run, m)


go(main)
