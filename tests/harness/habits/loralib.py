"""LoRA as loralib writes it: train(mode) merges and unmerges the weights by .data += B @ A."""

NO_PLAIN = 1
STRATEGIES = ["zero", "fsdp"]

from kit import *


class Lora(nn.Linear):
    def __init__(s, i, o):
        super().__init__(i, o)
        s.A, s.B = nn.Parameter(torch.randn(2, i) * 0.1), nn.Parameter(torch.zeros(o, 2))
        s.weight.requires_grad_(False)
        s.merged = False

    def train(s, mode=True):
        super().train(mode)
        if hasattr(s, "merged") and s.merged == mode:
            s.weight.data += (s.B @ s.A) * (-1 if mode else 1)
            s.merged = not mode
        return s

    def forward(s, x):
        out = F.linear(x, s.weight, s.bias)
        return out if s.merged else out + x @ s.A.T @ s.B.T


def main(run):
    m = run.model(nn.Sequential(Lora(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    v = run.loader(data(), global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        for x, y in run.evaluate(v):
            run.measure(loss_held=F.cross_entropy(m(x), y, reduction="none"))
    done(run, m)


go(main)
