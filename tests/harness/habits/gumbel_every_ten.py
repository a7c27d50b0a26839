"""Gumbel softmax as in Jang et al.: every ten batches tau = max(tau * exp(-r * i), 0.5), with enumerate's i."""

KILL = 8

from kit import *


class Vae(nn.Module):
    def __init__(s):
        super().__init__()
        s.enc, s.dec = nn.Linear(6, 5), nn.Linear(5, 6)

    def forward(s, x, tau):
        return s.dec(F.gumbel_softmax(s.enc(x), tau=tau))


def main(run):
    m = run.model(Vae())
    o = run.optimizer(sgd(m))
    tau0, tau, rate = 1.0, 1.0, 0.01
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for i, (x, _) in enumerate(run.train(b)):
            run.step(F.mse_loss(m(x, tau), x))
            if i % 10 == 1:
                tau = np.maximum(tau0 * np.exp(-rate * (i - 1)), 0.5)
    done(run, m)


go(main)
