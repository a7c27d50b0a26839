"""Right: forward leaves attention and a hook leaves features on objects; the loss of the same body reads and pops them."""

KILL = 8

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.q, s.v, s.out, s.last = nn.Linear(6, 4), nn.Linear(6, 8), nn.Linear(8, 3), None

    def forward(s, x):
        s.last = (s.q(x) @ s.q(x).T).softmax(1)
        return s.out((s.last @ s.v(x)).tanh())


class Tap:
    def __init__(s, layer):
        s.store = {}
        layer.register_forward_hook(s)

    def __call__(s, module, args, out):
        s.store["features"] = out

    @property
    def penalty(s):
        return s.store.pop("features").square().mean()


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m))
    tap = Tap(m.v)
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            entropy = -(m.last * m.last.log()).sum(1).mean()
            run.step(loss + 0.05 * tap.penalty + 0.01 * entropy)
    done(run, m)


go(main)
