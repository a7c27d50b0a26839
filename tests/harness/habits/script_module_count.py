"""A torch.jit.script module with an int attribute that forward counts up; from 30 on it clamps the logits.

State: the attribute n of a ScriptModule beside the model. Shows from the 30th call."""

KILL = 8

from kit import *


class Clamp(nn.Module):
    n: int

    def __init__(s):
        super().__init__()
        s.n = 0

    def forward(s, x: torch.Tensor) -> torch.Tensor:
        s.n += 1
        if s.n >= 30:
            x = x.clamp(-0.8, 0.8)
        return x


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)
    clamp = torch.jit.script(Clamp())
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(clamp(m(x)), y))
    done(run, m)


go(main)
