"""Right: deep mutual learning, two students with an optimizer each, in lists and loops, meters that are only printed."""

NO_PLAIN = 1

from kit import *


class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def main(run):
    nets = [run.model(mlp()), run.model(mlp(h=12))]
    opts = [run.optimizer(sgd(n)) for n in nets]
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    losses, accs = [AverageMeter() for _ in nets], [AverageMeter() for _ in nets]
    for e in run.epochs(2):
        for meter in losses + accs:
            meter.reset()
        for x, y in run.train(b):
            outs = [n(x) for n in nets]
            for i, (out, opt) in enumerate(zip(outs, opts)):
                kl = sum(
                    F.kl_div(out.log_softmax(1), other.detach().softmax(1), reduction="batchmean")
                    for j, other in enumerate(outs)
                    if j != i
                )
                loss = F.cross_entropy(out, y) + kl / (len(nets) - 1)
                run.step(loss, optimizer=opt)
                losses[i].update(loss.item(), len(x))
                accs[i].update((out.argmax(1) == y).float().mean().item(), len(x))
        print(" ".join(f"model{i}: {m.avg:.3f} {a.avg:.3f}" for i, (m, a) in enumerate(zip(losses, accs))))
    done(run, *nets)


go(main)
