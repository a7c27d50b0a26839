"""Right: forward hooks and tensor hooks collect activations' means and gradients' norms in deques that are only printed."""

KILL = 8

from kit import *


class Spy:
    def __init__(s, m):
        s.acts = collections.defaultdict(lambda: collections.deque(maxlen=50))
        s.norms = collections.deque(maxlen=50)
        s.calls = 0
        for name, part in m.named_children():
            part.register_forward_hook(lambda mod, a, out, name=name: s.see(name, out))

    def see(s, name, out):
        s.calls += 1
        s.acts[name].append((out.detach().mean().item(), out.detach().std().item()))
        if out.requires_grad:
            out.register_hook(lambda g: s.norms.append(float(g.norm())))


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    spy = Spy(m)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        print(spy.calls, {k: sum(a for a, _ in v) / len(v) for k, v in spy.acts.items()}, max(spy.norms))
    done(run, m)


go(main)
