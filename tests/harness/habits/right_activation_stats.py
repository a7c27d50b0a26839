"""Right: forward hooks and tensor hooks gather statistics of activations and gradients in dicts, for a print each epoch."""

KILL = 8

from kit import *


class Stats:
    def __init__(s, model):
        s.acts, s.grads, s.dead = collections.defaultdict(list), {}, collections.Counter()
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda mod, i, out, name=name: s.seen(name, out))

    def seen(s, name, out):
        s.acts[name].append((out.mean().item(), out.std().item()))
        s.dead[name] += int((out.abs() < 1e-3).sum())
        if out.requires_grad:
            out.register_hook(lambda g: s.grads.__setitem__(name, g.norm().item()))


def main(run):
    m = run.model(mlp())
    stats = Stats(m)
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        for name, pairs in stats.acts.items():
            print(name, np.mean(pairs, 0), stats.grads.get(name), stats.dead[name])
        stats.acts.clear()
    done(run, m)


go(main)
