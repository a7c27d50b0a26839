"""Right: a CallbackList with a timer, a NaN watch, a rate monitor, a divergence warner and a history; all only print."""

KILL = 8

from kit import *


class Callback:
    def on_batch_end(self, t, loss): ...
    def on_epoch_end(self, t): ...


class Timer(Callback):
    def __init__(self):
        self.start, self.laps = time.perf_counter(), []

    def on_batch_end(self, t, loss):
        now = time.perf_counter()
        self.laps.append(now - self.start)
        self.start = now


class DivergenceWarner(Callback):
    def __init__(self, n=10):
        self.window, self.warned, self.best = collections.deque(maxlen=n), False, None

    def on_batch_end(self, t, loss):
        value = loss.item()
        self.window.append(value)
        if not math_isfinite(value) or (
            len(self.window) == 10 and value > 3 * np.median(self.window) and not self.warned
        ):
            self.warned = True
            print("the loss is strange:", value)
        self.best = value if self.best is None or value < self.best else self.best


class History(Callback):
    def __init__(self):
        self.rows, self.current = [], []

    def on_batch_end(self, t, loss):
        self.current.append((len(self.current), loss.detach(), t.opt.param_groups[0]["lr"]))

    def on_epoch_end(self, t):
        self.rows.append(float(torch.stack([row[1] for row in self.current]).mean()))
        self.current = []
        print(self.rows)


def math_isfinite(value):
    return value == value and abs(value) != float("inf")


class Trainer:
    def __init__(self, run, callbacks):
        self.run, self.callbacks, self.batch = run, callbacks, 0
        self.net = run.model(mlp())
        self.opt = run.optimizer(sgd(self.net))

    def fire(self, event, *args):
        for c in self.callbacks:
            getattr(c, event)(self, *args)

    def fit(self, loader):
        for _ in self.run.epochs(2):
            for x, y in self.run.train(loader):
                loss = F.cross_entropy(self.net(x), y)
                self.run.step(loss)
                self.batch += 1
                self.fire("on_batch_end", loss)
            self.fire("on_epoch_end")


def main(run):
    t = Trainer(run, [Timer(), DivergenceWarner(), History()])
    t.fit(run.loader(data(192), global_batch=16, micro_batch=4))
    done(run, t.net)


go(main)
