"""Right: every body sets tau on the modules, but as a function of run.progress.step alone; tqdm counts for the eye."""

KILL = 8

from kit import *
from tqdm import tqdm


class Quantizer(nn.Module):
    tau = 1.0

    def __init__(s):
        super().__init__()
        s.codes = nn.Embedding(5, 6)

    def forward(s, logits):
        return F.gumbel_softmax(logits, tau=s.tau) @ s.codes.weight


def anneal(model, step):
    for module in model.modules():
        if hasattr(module, "tau"):
            module.tau = max(0.5, 0.95**step)
    return model


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 5), Quantizer()))
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        bar = tqdm(run.train(b), file=open(os.devnull, "w"), disable=PLAIN)
        for x, _ in bar:
            loss = F.mse_loss(anneal(m, run.progress.step)(x), x)
            bar.set_postfix(loss=loss.item(), n=bar.n)
            run.step(loss)
    done(run, m)


go(main)
