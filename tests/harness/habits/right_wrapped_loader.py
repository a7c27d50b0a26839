"""Right: a generator around run.train that normalises and counts; a context manager of timers; both for the print only."""

KILL = 8

from kit import *


@contextlib.contextmanager
def timed(name, table):
    t0 = time.perf_counter()
    try:
        yield
    finally:
        total, calls = table.get(name, (0.0, 0))
        table[name] = total + time.perf_counter() - t0, calls + 1


def prepared(batches, counts):
    for x, y in batches:
        counts["batches"] += 1
        counts["samples"] += len(x)
        yield (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5), y


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    table, counts = {}, collections.Counter()
    for e in run.epochs(2):
        for x, y in prepared(run.train(b), counts):
            with timed("forward", table):
                loss = F.cross_entropy(m(x), y)
            with timed("backward", table):
                run.step(loss)
        run.say(str({k: f"{s / n * 1e3:.2f} ms" for k, (s, n) in table.items()}) + str(dict(counts)))
    done(run, m)


go(main)
