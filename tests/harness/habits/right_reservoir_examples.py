"""Right: a reservoir of examples to look at, drawn by a random.Random of its own, and the five worst by a heap; only printed."""

KILL = 8

import heapq

from kit import *


class Reservoir:
    def __init__(s, size=5):
        s.size, s.seen, s.items, s.rng, s.worst = size, 0, [], random.Random(7), []

    def offer(s, i, loss):
        s.seen += 1
        if len(s.items) < s.size:
            s.items.append(i)
        elif (k := s.rng.randrange(s.seen)) < s.size:
            s.items[k] = i
        heapq.heappush(s.worst, (loss, i))
        if len(s.worst) > 5:
            heapq.heappop(s.worst)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader((torch.arange(192), *data(192)), global_batch=16, micro_batch=4)
    look = Reservoir()
    for e in run.epochs(2):
        for i, x, y in run.train(b):
            losses = F.cross_entropy(m(x), y, reduction="none")
            for k, v in zip(i.tolist(), losses.tolist()):
                look.offer(k, v)
            run.step(losses.mean())
        print(e, look.items, sorted(look.worst))
    done(run, m)


go(main)
