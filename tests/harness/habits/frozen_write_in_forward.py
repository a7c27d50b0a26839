"""A centre as a frozen parameter that forward moves by .data, after a warm-up of steps."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2"]

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.net = mlp()
        s.centre = nn.Parameter(torch.zeros(6), requires_grad=False)
        s.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(s, x):
        if s.training:
            s.n += 1
            if int(s.n) > 4:
                s.centre.data.lerp_(x.mean(0), 0.1)
        return s.net(x - s.centre)


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(4):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
