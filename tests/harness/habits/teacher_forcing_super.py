"""Seq2seq: the base class of a shared trainer counts iterations, a property makes the teacher forcing ratio of it."""

KILL = 8

from kit import *
from labs.trainer import BaseTrainer


class Seq(nn.Module):
    def __init__(s):
        super().__init__()
        s.cell, s.out = nn.GRUCell(1, 6), nn.Linear(6, 1)

    def forward(s, x, ratio):
        h, inp, outs = torch.zeros(len(x), 6), x[:, :1], []
        for t in range(1, x.shape[1]):
            h = s.cell(inp, h)
            outs.append(s.out(h))
            inp = x[:, t : t + 1] if random.random() < ratio else outs[-1]
        return torch.cat(outs, 1)


class Trainer(BaseTrainer):
    @property
    def ratio(s):
        return max(0.0, 1.0 - s.iteration // 16 * 0.4)

    def training_step(s, batch):
        super().training_step(batch)
        x, _ = batch
        return F.mse_loss(s.model(x, s.ratio), x[:, 1:])


def main(run):
    m = run.model(Seq())
    o = run.optimizer(sgd(m))
    Trainer(run, m).fit(run.loader(data(192), global_batch=16, micro_batch=4), 1)
    done(run, m)


go(main)
