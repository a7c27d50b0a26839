"""ControlVAE: a PI controller sets beta once a step from the KL of the batch at hand; its integral is an attribute."""

KILL = 8

from kit import *


class PIControl:
    def __init__(self):
        self.I_k1, self.W_k1, self.e_k1 = 0.0, 0.0, 0.0

    def pid(self, expected, kl_loss, gain=0.01, integral=-0.001):
        error_k = expected - kl_loss
        Pk = gain * 1.0 / (1.0 + np.exp(error_k))
        Ik = self.I_k1 + integral * error_k
        if self.W_k1 < 0 and self.W_k1 >= 1:
            Ik = self.I_k1
        Wk = Pk + Ik
        self.W_k1, self.I_k1, self.e_k1 = Wk, Ik, error_k
        return min(max(Wk, 0.0), 1.0)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


def main(run):
    m = run.model(VAE())
    run.optimizer(adam(m))
    b = run.loader(numbers(96, 6), global_batch=16, micro_batch=4)
    pid, beta = PIControl(), 0.0
    for e in run.epochs(2):
        for x in run.train(b):
            out, mu, logvar = m(x)
            kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1).mean()
            loss = F.mse_loss(out, x) + beta * kl
            if run.step(loss):
                beta = pid.pid(3.0, kl.item())
    done(run, m)


go(main)
