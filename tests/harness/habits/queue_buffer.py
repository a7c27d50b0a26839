"""A memory bank in a buffer, as SimSiam/NNCLR/RegionMoCo write it: each batch writes its own rows by index."""

from kit import *


class Bank(nn.Module):
    def __init__(s):
        super().__init__()
        s.net = mlp(k=4)
        s.register_buffer("bank", torch.zeros(40, 4))

    def forward(s, x, i):
        z = F.normalize(s.net(x), dim=1)
        s.bank[i] = 0.5 * s.bank[i] + 0.5 * z.detach()
        return z, z @ s.bank.detach().clone().T


def main(run):
    m = run.model(Bank())
    o = run.optimizer(sgd(m))
    b = run.loader((data()[0], torch.arange(40)), global_batch=16, micro_batch=2)
    for e in run.epochs(2):
        for x, i in run.train(b):
            run.step(F.cross_entropy(m(x, i)[1] / 0.2, i))
    done(run, m)


go(main)
