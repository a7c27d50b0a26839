"""Synaptic Intelligence: p.w and p.omega are attributes of parameters; the second task (epoch 2 on) is held by them."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    tasks = [
        run.loader(data(64), global_batch=16, micro_batch=4),
        run.loader((numbers(64, 6, seed=8), classes(64, seed=9)), global_batch=16, micro_batch=4),
    ]
    for p in m.parameters():
        p.omega, p.star, p.path = torch.zeros_like(p), p.detach().clone(), torch.zeros_like(p)
    for e in run.epochs(4):
        for x, y in run.train(tasks[e // 2]):
            loss = F.cross_entropy(m(x), y)
            if e >= 2:
                loss = loss + 0.5 * sum((p.omega * (p - p.star).square()).sum() for p in m.parameters())
            if run.backward(loss):
                with torch.no_grad():
                    for p in m.parameters():
                        p.path += p.grad.square()
            run.update()
        if e == 1:
            for p in m.parameters():
                p.omega, p.star = p.path.clone(), p.detach().clone()
    done(run, m)


go(main)
