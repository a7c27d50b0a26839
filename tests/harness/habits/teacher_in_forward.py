"""A momentum encoder inside of the model that forward moves after a warm-up of 4 steps (buffer counter), in place."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "parameter-server@3"]

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.q = mlp(k=4)
        s.k = copy.deepcopy(s.q).requires_grad_(False)
        s.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(s, x):
        if s.training:
            s.n += 1
            if int(s.n) > 4:
                with torch.no_grad():
                    for a, b in zip(s.q.parameters(), s.k.parameters()):
                        b.data.mul_(0.9).add_(a.data, alpha=0.1)
        with torch.no_grad():
            k = s.k(x + 0.1)
        return F.mse_loss(s.q(x), k) + s.q(x).var(0).sub(1).square().mean()


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m, lr=0.03))
    b = run.loader(data()[:1], global_batch=16, micro_batch=4)
    for e in run.epochs(4):
        for (x,) in run.train(b):
            run.step(m(x))
    done(run, m)


go(main)
