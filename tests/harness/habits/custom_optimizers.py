"""Lion, LAMB, Adafactor-like factored moments, Shampoo-like whitening: each for a part of a model, with groups."""

STRATEGIES = ["zero", "zero@3", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "parameter-server@3"]

from kit import *


class Mixed(torch.optim.Optimizer):
    def __init__(s, ps):
        super().__init__(ps, dict(lr=0.02, kind="lion"))

    @torch.no_grad()
    def step(s, closure=None):
        for g in s.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                st, d, k = s.state[p], p.grad, g["kind"]
                if k == "lion":
                    m = st.setdefault("m", torch.zeros_like(p))
                    u = (m * 0.9 + d * 0.1).sign()
                    m.mul_(0.99).add_(d, alpha=0.01)
                    p.mul_(1 - 0.01 * g["lr"]).add_(u, alpha=-g["lr"])
                elif k == "lamb":
                    m, v = st.setdefault("m", torch.zeros_like(p)), st.setdefault("v", torch.zeros_like(p))
                    m.lerp_(d, 0.1)
                    v.mul_(0.99).addcmul_(d, d, value=0.01)
                    u = m / (v.sqrt() + 1e-6) + 0.01 * p
                    r = p.norm() / u.norm().clamp(min=1e-6)
                    p.add_(u * (r.clamp(0.01, 10) * -g["lr"]))
                elif k == "factored" and p.dim() == 2:
                    r, c = st.setdefault("r", torch.zeros(p.shape[0])), st.setdefault("c", torch.zeros(p.shape[1]))
                    r.lerp_((d * d).mean(1), 0.1)
                    c.lerp_((d * d).mean(0), 0.1)
                    p.sub_(g["lr"] * d / ((r[:, None] * c[None] / r.mean().clamp(min=1e-12)).sqrt() + 1e-4))
                elif k == "shampoo" and p.dim() == 2:
                    L = st.setdefault("L", torch.eye(p.shape[0]) * 1e-2)
                    L.add_(d @ d.T)
                    x = L / L.norm()
                    p.sub_(g["lr"] * ((3 * torch.eye(p.shape[0]) - x) @ d))
                else:
                    p.sub_(g["lr"] * d)


def main(run):
    n = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    m = run.model(n)
    o = run.optimizer(
        Mixed(
            [
                {"params": list(m[i].parameters()), "kind": k}
                for i, k in ((0, "lion"), (2, "lamb"), (4, "factored"), (6, "shampoo"))
            ]
        )
    )
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
