"""Federated averaging, as the message of a resume advises: the global weights and those of clients are kept."""

NO_PLAIN = 1

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, momentum=0))
    x, y = data(64)
    clients = [run.loader((x[i::2], y[i::2]), global_batch=16, micro_batch=4) for i in range(2)]
    start, states = {}, []
    run.keep(start=start, states=states)
    for r in run.epochs(3):
        start.update(copy.deepcopy(dict(m.state_dict())))
        states.clear()
        for c in clients:
            m.load_state_dict(start)
            for a, t in run.train(c):
                run.step(F.cross_entropy(m(a), t))
            states.append(copy.deepcopy(dict(m.state_dict())))
        m.load_state_dict({k: sum(s[k] for s in states) / len(states) for k in start})
    done(run, m)


go(main)
