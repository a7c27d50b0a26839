"""Right: meters[k] += v.item() for each part of a dict of losses, in a function train_one_epoch; a stats dict holds the batch too."""

from kit import *


def train_one_epoch(run, model, batches, meters, stats):
    for batch in run.train(batches):
        out = model(batch["x"])
        losses = {"ce": F.cross_entropy(out, batch["y"]), "l2": 0.01 * out.square().mean()}
        total = sum(losses.values())
        for k, v in losses.items():
            meters[k] += v.item()
        meters["n"] += 1
        stats.update(batch)
        stats["pred"] = out.argmax(1)
        stats["count"] = stats.get("count", 0) + len(out)
        run.step(total)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    x, y = data(96)
    b = run.loader([{"x": a, "y": c} for a, c in zip(x, y)], global_batch=16, micro_batch=4)
    meters, stats = collections.defaultdict(float), {}
    for e in run.epochs(2):
        train_one_epoch(run, m, b, meters, stats)
        print({k: v / meters["n"] for k, v in meters.items()}, stats["count"])
    done(run, m)


go(main)
