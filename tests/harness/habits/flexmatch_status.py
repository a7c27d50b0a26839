"""FlexMatch: the learning status of each class, from pseudo-labels by index in a tensor; used once 40 were selected."""

KILL = 11

from kit import *


class FlexMatch:
    def __init__(self, n, k=3, cutoff=0.55):
        self.selected, self.classwise_acc, self.cutoff, self.k = torch.full((n,), -1), torch.ones(k), cutoff, k

    def update(self):
        done_ = self.selected[self.selected >= 0]
        if len(done_) > 40:
            counts = torch.bincount(done_, minlength=self.k).float()
            self.classwise_acc = counts / counts.max()

    def loss(self, weak, strong, index):
        conf, label = weak.detach().softmax(1).max(1)
        acc = self.classwise_acc[label]
        mask = (conf > self.cutoff * (acc / (2.0 - acc))).float()
        high = conf > 0.4
        self.selected[index[high]] = label[high]
        self.update()
        return (F.cross_entropy(strong, label, reduction="none") * mask).mean()


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader((*data(320), numbers(320, 6, seed=9), torch.arange(320)), global_batch=16, micro_batch=4)
    flex = FlexMatch(320)
    for e in run.epochs(1):
        for x, y, u, i in run.train(b):
            unsup = flex.loss(m(u), m(u + 0.3 * torch.randn_like(u)), i)
            run.step(F.cross_entropy(m(x), y) + unsup)
    done(run, m)


go(main)
