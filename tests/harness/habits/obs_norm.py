"""RL: a RunningMeanStd in numpy normalises observations; it sees each rollout between steps; only the rollout is kept."""

NO_PLAIN = 1

from kit import *


class RunningMeanStd:
    def __init__(self, shape):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, x):
        bm, bv, n = x.mean(0), x.var(0), len(x)
        delta, total = bm - self.mean, self.count + n
        self.mean = self.mean + delta * n / total
        self.var = (self.var * self.count + bv * n + delta**2 * self.count * n / total) / total
        self.count = total

    def normalize(self, x):
        return (x - self.mean) / np.sqrt(self.var + 1e-8)


def rollout(policy, rng, n=16):
    return rng.normal(2.0, 3.0, (n, 6))


def main(run):
    pi = run.model(mlp(k=1))
    run.optimizer(adam(pi))
    rms = RunningMeanStd(6)
    obs = torch.zeros(16, 6)
    run.keep(obs=obs)
    b = run.loader((obs,), global_batch=16, micro_batch=4)
    for step in run.steps(12, every=1):
        raw = rollout(pi, np.random.RandomState(step))
        rms.update(raw)
        obs.copy_(torch.from_numpy(rms.normalize(raw)).float())
        for (o,) in run.train(b):
            run.step((pi(o).squeeze(1) - o.sum(1)).square().mean())
    done(run, pi)


go(main)
