"""Right: hooks put activations into a dict, from which the same body takes a distillation loss to a frozen teacher."""

KILL = 8

from kit import *


def main(run):
    features, handles = {}, []

    def catch(name):
        def hook(module, args, out):
            features[name] = out

        return hook

    teacher = mlp(h=8).requires_grad_(False).eval()
    m = run.model(mlp(h=8))
    o = run.optimizer(sgd(m))
    handles.append(teacher[1].register_forward_hook(catch("teacher")))
    handles.append(m[1].register_forward_hook(catch("student")))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            with torch.no_grad():
                teacher(x)
            out = m(x)
            run.step(F.cross_entropy(out, y) + 0.1 * F.mse_loss(features["student"], features["teacher"]))
    for h in handles:
        h.remove()
    done(run, m)


go(main)
