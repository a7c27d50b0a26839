"""Right: a deque of times, samples per second, a list of losses for a plot, and a json of it on the leader."""

KILL = 8

import json

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    times, curve, seen, started = collections.deque(maxlen=20), [], 0, time.perf_counter()
    for e in run.epochs(3):
        for x, y in run.train(b):
            t0 = time.perf_counter()
            loss = F.cross_entropy(m(x), y)
            run.step(loss)
            times.append(time.perf_counter() - t0)
            seen += len(x)
            curve.append((seen, loss.item(), time.perf_counter() - started))
            if seen % 40 == 0:
                run.say(
                    f"{len(x) * len(times) / sum(times):.0f} samples/s, smoothed {np.mean([l for _, l, _ in curve[-10:]]):.3f}"
                )
        if run.leads:
            with open("curve.json", "w") as f:
                json.dump(curve, f)
    done(run, m)


go(main)
