"""Right: multi-task uncertainty weights as parameters (log_vars) of a loss module that is a model, and a history of them."""

from kit import *


class AutomaticWeightedLoss(nn.Module):
    def __init__(self, num=2):
        super().__init__()
        self.params = nn.Parameter(torch.ones(num))

    def forward(self, *losses):
        return sum(0.5 / p**2 * l + (1 + p**2).log() for p, l in zip(self.params, losses))


def main(run):
    m, awl = run.model(mlp(k=4)), run.model(AutomaticWeightedLoss())
    run.optimizer(
        torch.optim.Adam([{"params": m.parameters()}, {"params": awl.parameters(), "weight_decay": 0}], lr=0.01)
    )
    x, y = data(64)
    b = run.loader((x, y, x.sum(1)), global_batch=16, micro_batch=4)
    history = {"w0": [], "w1": [], "seg": []}
    for e in run.epochs(2):
        for x, y, z in run.train(b):
            out = m(x)
            seg, depth = F.cross_entropy(out[:, :3], y), F.mse_loss(out[:, 3], z)
            history["seg"].append(seg.item())
            if run.step(awl(seg, depth)):
                history["w0"].append(awl.params[0].item())
                history["w1"].append(awl.params[1].item())
        print({k: round(sum(v) / len(v), 3) for k, v in history.items() if v})
    done(run, m, awl)


go(main)
