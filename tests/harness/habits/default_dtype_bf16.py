"""torch.set_default_dtype(torch.bfloat16) left set; a buffer counts the elements seen, another one the batches."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2"]
TOL = 2e-2

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.net = mlp()
        s.register_buffer("seen", torch.zeros((), dtype=torch.long))
        s.register_buffer("mean", torch.zeros(6, dtype=torch.float32))

    def forward(s, x):
        if s.training:
            s.seen += 1003
            s.mean.lerp_(x.float().mean(0), 0.1)
        return s.net(x)


def main(run):
    torch.set_default_dtype(torch.bfloat16)
    m = run.model(Net())
    o = run.optimizer(adam(m))
    x, y = data()
    b = run.loader((x.bfloat16(), y), global_batch=16, micro_batch=2)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x).float(), y))
    done(run, m)


go(main)
