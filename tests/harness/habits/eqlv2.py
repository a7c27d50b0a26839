"""EQL v2: a hook on the logits adds up positive and negative gradients per class, and their ratio weights the loss."""

from kit import *


class EQLv2(nn.Module):
    def __init__(self, num_classes=3, gamma=12, mu=0.8, alpha=4.0):
        super().__init__()
        self.num_classes, self.gamma, self.mu, self.alpha = num_classes, gamma, mu, alpha
        self.pos_grad = torch.zeros(num_classes)
        self.neg_grad = torch.zeros(num_classes)
        self.pos_neg = torch.ones(num_classes) * 100

    def forward(self, logits, label):
        target = F.one_hot(label, self.num_classes).float()
        neg_w = torch.sigmoid(self.gamma * (self.pos_neg - self.mu))
        pos_w = 1 + self.alpha * (1 - neg_w)
        weight = pos_w * target + neg_w * (1 - target)
        logits.register_hook(lambda grad: self.collect_grad(grad.detach(), target))
        loss = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        return (loss * weight).sum(1).mean()

    def collect_grad(self, grad, target):
        self.pos_grad += (grad.abs() * target).sum(0)
        self.neg_grad += (grad.abs() * (1 - target)).sum(0)
        self.pos_neg = self.pos_grad / (self.neg_grad + 1e-10)


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    criterion = EQLv2()
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(criterion(m(x), y))
    done(run, m)


go(main)
