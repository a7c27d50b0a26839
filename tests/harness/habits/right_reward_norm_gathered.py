"""Right: rewards are normalised by a running mean and variance of all ranks' rewards, gathered once a step, kept."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    stats = torch.tensor([0.0, 1.0, 1e-4], dtype=torch.float64)
    run.keep(stats=stats)
    found = []
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, _ in run.train(b):
            pi = torch.distributions.Categorical(logits=m(x))
            a = pi.sample()
            r = (a == x[:, :3].argmax(1)).float() + 0.1 * x[:, 3]
            if run.counts:
                found.append(r)
            mean, var, n = stats.tolist()
            advantage = (r - mean) / (var + 1e-8) ** 0.5 if n > 1 else r
            if run.step(-(pi.log_prob(a) * advantage).mean()):
                new = torch.cat([t for part in run.gather(found) for t in part]).double()
                total = n + len(new)
                delta = new.mean() - mean
                stats[1] = (var * n + new.var(unbiased=False) * len(new) + delta**2 * n * len(new) / total) / total
                stats[0] += delta * len(new) / total
                stats[2] = total
                found.clear()
    done(run, m)


go(main)
