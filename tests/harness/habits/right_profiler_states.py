"""Right: a profiler with wait, warm-up and active phases by its own step count, which records times of sections."""

KILL = 8

from kit import *


class Profiler:
    def __init__(self, wait=3, warmup=2, active=4):
        self.cycle, self.wait, self.warmup = wait + warmup + active, wait, warmup
        self.n, self.table, self.stack = 0, collections.Counter(), []

    @property
    def phase(self):
        k = self.n % self.cycle
        return "wait" if k < self.wait else "warmup" if k < self.wait + self.warmup else "active"

    @contextlib.contextmanager
    def section(self, name):
        self.stack.append(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.phase == "active":
                self.table["/".join(self.stack)] += time.perf_counter() - start
            self.stack.pop()

    def step(self):
        self.n += 1
        if self.n % self.cycle == 0:
            print(self.table.most_common(3))
            self.table.clear()


def main(run):
    m = run.model(mlp())
    o = run.optimizer(adam(m))
    prof = Profiler()
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            with prof.section("body"):
                with prof.section("forward"):
                    loss = F.cross_entropy(m(x), y)
                with prof.section("step"):
                    run.step(loss)
            prof.step()
    done(run, m)


go(main)
