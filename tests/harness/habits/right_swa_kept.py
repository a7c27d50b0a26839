"""Right: SWA by hand: a kept dict of means and run.kept.n, moved once in each 3 steps from step 9 on, loaded at the end."""

KILL = 14

from kit import *


@torch.no_grad()
def update_swa(run, model, swa):
    n = run.kept.n
    for name, p in model.state_dict().items():
        swa[name] = p.clone() if n == 0 else swa[name] + (p - swa[name]) / (n + 1)
    run.kept.n = n + 1


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    swa, rates = {}, []
    run.keep(swa=swa, n=0)
    b = run.loader(data(320), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)):
                if run.progress.step >= 9:
                    for g in o.param_groups:
                        g["lr"] = 0.03
                    if run.progress.step % 3 == 0:
                        update_swa(run, m, swa)
                rates.append(o.param_groups[0]["lr"])
    print(rates, run.kept.n)
    m.load_state_dict(swa)
    done(run, m)


go(main)
