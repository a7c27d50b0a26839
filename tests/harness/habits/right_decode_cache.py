"""Right: a data set with an OrderedDict as LRU cache of decoded items, counts of hits and misses, printed each epoch."""

KILL = 8

from kit import *


class Decoded(Dataset):
    def __init__(s, size):
        s.x, s.y = data(96)
        s.cache, s.size, s.hits, s.misses = collections.OrderedDict(), size, 0, 0

    def __len__(s):
        return 96

    def decode(s, i):
        return (s.x[i] * 3).tanh()

    def __getitem__(s, i):
        if i in s.cache:
            s.hits += 1
            s.cache.move_to_end(i)
        else:
            s.misses += 1
            s.cache[i] = s.decode(i)
            if len(s.cache) > s.size:
                s.cache.popitem(last=False)
        return s.cache[i] + 0.1 * torch.randn(6), s.y[i]


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    d = Decoded(30)
    b = run.loader(d, global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        run.say(f"epoch {e}: {d.hits} hits, {d.misses} misses, rate {d.hits / max(1, d.hits + d.misses):.2f}")
    done(run, m)


go(main)
