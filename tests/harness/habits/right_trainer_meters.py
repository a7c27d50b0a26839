"""Right: a trainer with AverageMeters, a stopwatch, counters and an ETA, which only print."""

KILL = 8

from kit import *


class AverageMeter:
    def __init__(s, name):
        s.name = name
        s.reset()

    def reset(s):
        s.val = s.avg = s.sum = s.count = 0

    def update(s, val, n=1):
        s.val = val
        s.sum += val * n
        s.count += n
        s.avg = s.sum / s.count

    def __str__(s):
        return f"{s.name} {s.val:.4f} ({s.avg:.4f})"


class Trainer:
    def __init__(s, run):
        s.run, s.iteration, s.best_seen = run, 0, float("inf")
        s.model = run.model(mlp())
        s.optimizer = run.optimizer(sgd(s.model))
        s.loader = run.loader(data(96), global_batch=16, micro_batch=4)
        s.meters = {name: AverageMeter(name) for name in ("loss", "acc", "data_time", "batch_time")}
        s.history = collections.defaultdict(list)

    def train_epoch(s, e):
        end = time.time()
        for x, y in s.run.train(s.loader):
            s.meters["data_time"].update(time.time() - end)
            out = s.model(x)
            loss = F.cross_entropy(out, y)
            s.meters["loss"].update(loss.item(), len(x))
            s.meters["acc"].update((out.argmax(1) == y).float().mean().item(), len(x))
            s.best_seen = min(s.best_seen, loss.item())
            s.run.step(loss)
            s.iteration += 1
            s.meters["batch_time"].update(time.time() - end)
            end = time.time()
            if s.iteration % 10 == 0:
                eta = s.meters["batch_time"].avg * (24 - s.iteration)
                print(e, s.iteration, *map(str, s.meters.values()), f"eta {eta:.0f}", s.best_seen)
        for name, meter in s.meters.items():
            s.history[name].append(meter.avg)
            meter.reset()


def main(run):
    t = Trainer(run)
    for e in run.epochs(3):
        t.train_epoch(e)
    done(run, t.model)


go(main)
