"""Right: BYOL in a trainer class: kept target, its decay from run.progress.step, updated where run.step is True."""

KILL = 8

from kit import *


class Byol:
    def __init__(s, run, steps):
        s.run, s.steps = run, steps
        s.online = run.model(nn.ModuleDict({"net": mlp(k=4), "predict": nn.Linear(4, 4)}))
        s.target = copy.deepcopy(s.online["net"]).requires_grad_(False)
        run.keep(target=s.target)
        s.optimizer = run.optimizer(sgd(s.online))
        s.views = [lambda x: x + 0.2 * torch.randn_like(x), lambda x: x * (torch.rand_like(x) > 0.2)]

    @property
    def decay(s):
        return 1 - 0.1 * (np.cos(np.pi * s.run.progress.step / s.steps) + 1) / 2

    def loss(s, x):
        a, b = (view(x) for view in s.views)
        p = F.normalize(s.online["predict"](s.online["net"](a)), dim=1)
        return 2 - 2 * (p * F.normalize(s.target(b), dim=1)).sum(1).mean()

    @torch.no_grad()
    def move(s):
        for t, p in zip(s.target.parameters(), s.online["net"].parameters()):
            t.lerp_(p, 1 - s.decay)

    def fit(s, b):
        for e in s.run.epochs(1):
            for x, _ in s.run.train(b):
                _ = s.run.step(s.loss(x)) and s.move()


def main(run):
    t = Byol(run, 12)
    t.fit(run.loader(data(192), global_batch=16, micro_batch=4))
    done(run, t.online, target=t.target.state_dict())


go(main)
