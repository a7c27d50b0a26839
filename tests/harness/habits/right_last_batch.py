"""Right: dicts of loss parts and the last batch are variables from before the loop, updated in the body, printed after it."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp(k=6))
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    parts, last, worst = {}, None, (0.0, None)
    for e in run.epochs(3):
        for x, y in run.train(b):
            out = m(x)
            terms = {
                "mse": F.mse_loss(out, x),
                "l1": 0.1 * out.abs().mean(),
                "tv": 0.1 * out.diff(dim=1).square().mean(),
            }
            loss = sum(terms.values())
            parts.update({k: round(v.item(), 4) for k, v in terms.items()})
            last = x.clone(), out.detach()
            if loss.item() > worst[0]:
                worst = loss.item(), y.tolist()
            run.step(loss)
            if run.progress.step % 5 == 0:
                print(run.progress.step, parts)
        print("last", last[0][0].tolist(), last[1][0].tolist(), "worst", worst)
    done(run, m)


go(main)
