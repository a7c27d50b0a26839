"""FreeMatch: self-adaptive thresholds, time_p and p_model are moving averages in the algorithm object, moved in each batch."""

from kit import *


class SelfAdaptiveThreshold:
    def __init__(self, k=3, momentum=0.9):
        self.m = momentum
        self.time_p = torch.ones(k).mean() / k
        self.p_model = torch.ones(k) / k

    @torch.no_grad()
    def update(self, probs):
        top, _ = probs.max(1)
        self.time_p = self.time_p * self.m + (1 - self.m) * top.mean()
        self.p_model = self.p_model * self.m + (1 - self.m) * probs.mean(0)

    @torch.no_grad()
    def masking(self, probs):
        self.update(probs)
        top, idx = probs.max(1)
        mod = self.p_model / self.p_model.max()
        return top.ge(self.time_p * mod[idx]).float()


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    hook = SelfAdaptiveThreshold()
    x, y = data(64)
    b = run.loader((x, y, numbers(64, 6, seed=8)), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y, u in run.train(b):
            weak = m(u + 0.05 * torch.randn_like(u)).softmax(1)
            strong = m(u + 0.3 * torch.randn_like(u))
            mask = hook.masking(weak.detach())
            unsup = (F.cross_entropy(strong, weak.argmax(1), reduction="none") * mask).mean()
            run.step(F.cross_entropy(m(x), y) + unsup)
    done(run, m)


go(main)
