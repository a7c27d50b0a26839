"""DINO: the loss is a module with a `center` buffer that it moves in forward; the loss module is not given to the run."""

STRATEGIES = ["zero"]

from kit import *


class DinoLoss(nn.Module):
    def __init__(s):
        super().__init__()
        s.register_buffer("center", torch.zeros(1, 3))

    def forward(s, student, teacher):
        loss = -(((teacher - s.center) / 0.04).softmax(1) * (student / 0.1).log_softmax(1)).sum(1).mean()
        s.center = s.center * 0.9 + teacher.mean(0, keepdim=True) * 0.1
        return loss


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, lr=0.01))
    crit = DinoLoss()
    b = run.loader(data(), global_batch=16, micro_batch=2)
    for e in run.epochs(2):
        for x, y in run.train(b):
            with torch.no_grad():
                t = m(x + 0.1 * torch.randn_like(x))
            run.step(crit(m(x), t.detach()))
    done(run, m)


go(main)
