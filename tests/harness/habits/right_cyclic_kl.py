"""Right: a VAE with cyclical KL annealing and free bits from run.progress.step, and a sheet of fixed samples per epoch."""

from kit import *


def frange_cycle(n_iter, start=0.0, stop=1.0, n_cycle=4, ratio=0.5):
    L = np.ones(n_iter) * stop
    period = n_iter / n_cycle
    step = (stop - start) / (period * ratio)
    for c in range(n_cycle):
        v, i = start, 0
        while v <= stop and int(i + c * period) < n_iter:
            L[int(i + c * period)] = v
            v += step
            i += 1
    return L


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, 1)
        return self.dec(mu + torch.randn_like(mu) * (0.5 * logvar).exp()), mu, logvar


def main(run):
    m = run.model(VAE())
    run.optimizer(adam(m))
    b = run.loader(numbers(96, 6), global_batch=16, micro_batch=4)
    betas = frange_cycle(12)
    fixed_noise, sheets = torch.randn(4, 2), []
    for e in run.epochs(2):
        for x in run.train(b):
            out, mu, logvar = m(x)
            kl = (-0.5 * (1 + logvar - mu.square() - logvar.exp())).mean(0).clamp(min=0.02).sum()
            run.step(F.mse_loss(out, x) + float(betas[run.progress.step]) * kl)
            run.measure(kl=kl)
        with torch.no_grad():
            sheets.append(m.dec(fixed_noise))
        run.say(f"sheet {len(sheets)}: {sheets[-1].mean():.3f}")
    done(run, m)


go(main)
