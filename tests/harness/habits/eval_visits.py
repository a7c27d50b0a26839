"""Right: in eval mode a layer counts its calls and keeps the last attention, for a picture; nothing reads them."""

KILL = 11

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.net, s.calls, s.scores = mlp(), 0, []

    def forward(s, x):
        out = s.net(x)
        if not s.training:
            s.calls += 1
            s.scores.append(out.softmax(1).max(1).values.mean().item())
        return out


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    v = run.loader(data(32), global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        for x, y in run.evaluate(v):
            run.measure(val=F.cross_entropy(m(x), y, reduction="none"))
        run.say(f"confidence {sum(m.scores) / max(1, len(m.scores)):.3f} of {m.calls} calls")
        m.scores.clear()
    done(run, m)


go(main)
