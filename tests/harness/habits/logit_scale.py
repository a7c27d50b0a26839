"""CLIP: a parameter of no dimension (logit_scale), used by the script outside of forward, clamped once a step."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "parameter-server@3"]

from kit import *


class Clip(nn.Module):
    def __init__(s):
        super().__init__()
        s.a, s.b = nn.Linear(3, 4), nn.Linear(3, 4)
        s.logit_scale = nn.Parameter(torch.tensor(2.6))

    def forward(s, x):
        return F.normalize(s.a(x[:, :3]), dim=1), F.normalize(s.b(x[:, 3:]), dim=1)


def main(run):
    m = run.model(Clip())
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, _ in run.train(b):
            p, q = m(x)
            l = m.logit_scale.exp() * p @ q.T
            if run.step(F.cross_entropy(l, torch.arange(len(x)))):
                with torch.no_grad():
                    m.logit_scale.clamp_(0, 2.65)
    done(run, m)


go(main)
