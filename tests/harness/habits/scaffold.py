"""SCAFFOLD: each client has a control variate, the server has one, all in lists of lists of tensors; rounds are epochs."""

NO_PLAIN = 1

from kit import *


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m, momentum=0))
    x, y = data(64)
    clients = [run.loader((x[i::2], y[i::2]), global_batch=16, micro_batch=4) for i in range(2)]
    c = [torch.zeros_like(p) for p in m.parameters()]
    c_local = [[torch.zeros_like(p) for p in m.parameters()] for _ in clients]
    for r in run.epochs(4):
        i = r % 2
        start = [p.detach().clone() for p in m.parameters()]
        for a, t in run.train(clients[i]):
            drift = sum((p * (cg - cl)).sum() for p, cg, cl in zip(m.parameters(), c, c_local[i]))
            run.step(F.cross_entropy(m(a), t) + drift)
        with torch.no_grad():
            for k, p in enumerate(m.parameters()):
                new = c_local[i][k] - c[k] + (start[k] - p) / (2 * 0.1)
                c[k] = c[k] + (new - c_local[i][k]) / len(clients)
                c_local[i][k] = new
    done(run, m)


go(main)
