"""An optimizer that clips by the global norm within its step, as Adan's and NVIDIA's LAMB do."""

STRATEGIES = [
    "zero",
    "zero@3",
    "fsdp",
    "zero:stage=2",
    "hsdp:shard=2@4",
    "parameter-server@3",
    "parameter-server:servers=2@4",
    "pipeline",
]

from kit import *


class Clipping(torch.optim.Optimizer):
    def __init__(s, ps, lr=0.1, most=0.2):
        super().__init__(ps, dict(lr=lr, most=most))

    @torch.no_grad()
    def step(s, closure=None):
        ps = [p for g in s.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in ps]).norm()
        scale = (s.param_groups[0]["most"] / (norm + 1e-6)).clamp(max=1)
        for p in ps:
            st = s.state[p]
            v = st.setdefault("v", torch.zeros_like(p))
            v.mul_(0.9).add_(p.grad * scale)
            p.add_(v, alpha=-s.param_groups[0]["lr"])


def main(run):
    m = run.model(mlp())
    o = run.optimizer(Clipping(m.parameters()))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy, x, y)
    done(run, m)


go(main)
