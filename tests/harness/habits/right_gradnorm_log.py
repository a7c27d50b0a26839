"""Right: a deque of gradient norms and a table of updates for the screen, filled between run.backward and run.update."""

KILL = 8
NO_PLAIN = 1

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    norms, ratios = collections.deque(maxlen=10), collections.defaultdict(list)
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            if run.backward(F.cross_entropy(m(x), y)):
                for n, p in m.named_parameters():
                    ratios[n].append(float(p.grad.norm() / (p.norm() + 1e-8)))
                norms.append(float(torch.cat([p.grad.flatten() for p in m.parameters()]).norm()))
                if len(norms) == 10 and norms[-1] > 3 * np.median(norms):
                    print(f"step {run.progress.step}: the gradient jumps to {norms[-1]:.2f}")
                run.update()
    print({n: np.mean(r) for n, r in ratios.items()})
    done(run, m)


go(main)
