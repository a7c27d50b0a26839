"""Embedding(padding_idx=0, scale_grad_by_freq=True), EmbeddingBag(mode='max'), weight decay."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "parameter-server@3", "hybrid@3", "hybrid@4"]

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.e, s.f, s.l = (
            nn.Embedding(20, 6, padding_idx=0, scale_grad_by_freq=True),
            nn.EmbeddingBag(20, 6, mode="max", padding_idx=0),
            mlp(),
        )

    def forward(s, i):
        return s.l(s.e(i).mean(1) + s.f(i))


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m, weight_decay=0.01))
    g = torch.Generator().manual_seed(1)
    b = run.loader((torch.randint(0, 9, (40, 5), generator=g), data()[1]), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
