"""Diffusion with the loss-second-moment resampler of improved-diffusion: uniform until each t has its history."""

KILL = 8

from kit import *


class Resampler:
    def __init__(s, steps=4, history=4):
        s.T, s.H = steps, history
        s._loss_history = np.zeros([steps, history])
        s._loss_counts = np.zeros([steps], dtype=int)

    def _warmed_up(s):
        return (s._loss_counts == s.H).all()

    def weights(s):
        if not s._warmed_up():
            return np.ones([s.T])
        w = np.sqrt(np.mean(s._loss_history**2, axis=-1))
        return w / w.sum() * 0.99 + 0.01 / s.T

    def sample(s, n):
        w = s.weights()
        p = w / np.sum(w)
        i = np.random.choice(s.T, size=(n,), p=p)
        return torch.from_numpy(i).long(), torch.from_numpy(1 / (s.T * p[i])).float()

    def update(s, ts, losses):
        for t, l in zip(ts, losses):
            if s._loss_counts[t] == s.H:
                s._loss_history[t, :-1] = s._loss_history[t, 1:]
                s._loss_history[t, -1] = l
            else:
                s._loss_history[t, s._loss_counts[t]] = l
                s._loss_counts[t] += 1


def main(run):
    m = run.model(nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, 6)))
    o = run.optimizer(adam(m))
    sampler = Resampler()
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, _ in run.train(b):
            t, w = sampler.sample(len(x))
            a = (1 - (t + 1) / 5).unsqueeze(1)
            noise = torch.randn_like(x)
            out = m(torch.cat([a.sqrt() * x + (1 - a).sqrt() * noise, a], 1))
            each = (out - noise).square().mean(1)
            sampler.update(t.tolist(), each.tolist())
            run.step((each * w).mean())
    done(run, m)


go(main)
