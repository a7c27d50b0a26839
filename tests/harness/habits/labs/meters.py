"""Meters of a training."""


class Average:
    def __init__(self):
        self.total, self.n = 0.0, 0

    def __iadd__(self, value):
        self.total += value
        self.n += 1
        return self

    def __float__(self):
        return self.total / max(1, self.n)

    def __len__(self):
        return self.n


class Welford:
    """Running mean and variance of rewards, as in Baselines' RunningMeanStd."""

    def __init__(self):
        self.mean, self.var, self.count = 0.0, 1.0, 1e-4

    def update(self, x):
        m, v, n = float(x.mean()), float(x.var(unbiased=False)), len(x)
        delta, total = m - self.mean, self.count + n
        new = self.var * self.count + v * n + delta**2 * self.count * n / total
        self.mean, self.var, self.count = self.mean + delta * n / total, new / total, total

    def __call__(self, x):
        return (x - self.mean) / (self.var + 1e-8) ** 0.5
