"""Right: update-to-weight ratios from a copy of the last weights, tensor hooks that note gradient norms; both only print."""

KILL = 8

from kit import *


class WeightWatcher:
    def __init__(self, model):
        self.model, self.last, self.ratios = model, {}, collections.defaultdict(list)
        self.norms = collections.defaultdict(list)
        for name, p in model.named_parameters():
            p.register_hook(lambda g, name=name: self.norms[name].append(float(g.norm())))

    @torch.no_grad()
    def after_step(self):
        for name, p in self.model.named_parameters():
            if name in self.last:
                self.ratios[name].append(float((p - self.last[name]).norm() / p.norm()))
            self.last[name] = p.detach().clone()

    def report(self):
        for name, values in self.ratios.items():
            print(name, f"ratio {np.mean(values):.2e}, gradient {np.mean(self.norms[name]):.2e}")


def main(run):
    m = run.model(mlp())
    watcher = WeightWatcher(m)
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)):
                watcher.after_step()
        watcher.report()
    done(run, m)


go(main)
