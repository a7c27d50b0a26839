"""Seesaw loss for long tails (mmdet): the loss module has cum_samples, which it adds the labels of each batch to."""

from kit import *


class SeesawLoss(nn.Module):
    def __init__(self, num_classes=3, p=0.8, q=2.0, eps=1e-2):
        super().__init__()
        self.p, self.q, self.eps, self.num_classes = p, q, eps, num_classes
        self.register_buffer("cum_samples", torch.zeros(num_classes))

    def forward(self, cls_score, labels):
        for u in labels.unique():
            self.cum_samples[u] += (labels == u).sum()
        onehot = F.one_hot(labels, self.num_classes)
        weights = cls_score.new_ones(onehot.size())
        if self.p > 0:
            ratio = self.cum_samples[None, :].clamp(min=1) / self.cum_samples[:, None].clamp(min=1)
            index = (ratio < 1.0).float()
            weights = weights * (ratio.pow(self.p) * index + (1 - index))[labels.long(), :]
        if self.q > 0:
            scores = F.softmax(cls_score.detach(), dim=1)
            own = scores[torch.arange(len(scores)), labels.long()]
            matrix = scores / own[:, None].clamp(min=self.eps)
            index = (matrix > 1.0).float()
            weights = weights * (matrix.pow(self.q) * index + (1 - index))
        cls_score = cls_score + weights.log() * (1 - onehot)
        return F.cross_entropy(cls_score, labels)


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    criterion = SeesawLoss()
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(criterion(m(x), y))
    done(run, m)


go(main)
