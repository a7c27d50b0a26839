"""Federated averaging in one process: each round the clients train from the global weights, whose results are averaged."""

KILL = 5
NO_PLAIN = 1

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, momentum=0))
    x, y = data(64)
    clients = [run.loader((x[i::2], y[i::2]), global_batch=16, micro_batch=4) for i in range(2)]
    for r in run.epochs(3):
        start = copy.deepcopy(m.state_dict())
        states = []
        for c in clients:
            m.load_state_dict(start)
            for a, t in run.train(c):
                run.step(F.cross_entropy(m(a), t))
            states.append(copy.deepcopy(m.state_dict()))
        m.load_state_dict({k: sum(s[k] for s in states) / len(states) for k in start})
    done(run, m)


go(main)
