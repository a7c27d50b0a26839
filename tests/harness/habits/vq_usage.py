"""VQ-VAE: the quantizer counts in a numpy array how often each code is used, and its loss pulls unused codes to the batch."""

from kit import *


class VectorQuantizer(nn.Module):
    def __init__(self, n=8, dim=4):
        super().__init__()
        self.codes, self.usage, self.calls = nn.Parameter(torch.randn(n, dim)), np.zeros(n, dtype=np.int64), 0

    def forward(self, z):
        d = torch.cdist(z, self.codes)
        idx = d.argmin(1)
        q = self.codes[idx]
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        if self.training:
            self.usage += np.bincount(idx.numpy(), minlength=len(self.usage))
            self.calls += 1
            if self.calls > 6:
                dead = torch.from_numpy(self.usage < 3)
                if dead.any():
                    loss = loss + d[:, dead].square().mean()
        return z + (q - z).detach(), loss


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.vq, self.dec = nn.Linear(6, 4), VectorQuantizer(), nn.Linear(4, 6)

    def forward(self, x):
        q, loss = self.vq(self.enc(x))
        return F.mse_loss(self.dec(q), x) + loss


def main(run):
    m = run.model(VQVAE())
    run.optimizer(adam(m))
    b = run.loader(numbers(96, 6), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x in run.train(b):
            run.step(m(x))
    done(run, m)


go(main)
