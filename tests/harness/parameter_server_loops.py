"""Training as a script does it, for strategies of which some ranks serve the others."""

from torch.nn import functional as F


def classify(run, model, x, y, epochs, *, counted):
    """Train to tell ``y`` from ``x``, evaluate after each epoch; what was measured, by epoch.

    ``counted``: the mean is over the samples whose label is not 0.
    """
    batches = run.loader((x, y), global_batch=24, micro_batch=3)
    held_out = run.loader((x[:31], y[:31]), global_batch=12, micro_batch=3, shuffle=False)
    told = []
    for _ in run.epochs(epochs):
        for a, b in run.train(batches):
            if counted:
                kept = b > 0
                loss = F.cross_entropy(model(a)[kept], b[kept]) if kept.any() else 0 * model(a).sum()
                run.step(loss, count=int(kept.sum()))
            else:
                run.step(F.cross_entropy(model(a), b))
        for a, b in run.evaluate(held_out):
            run.measure(right=model(a).argmax(1) == b, out=model(a).square().sum(1))
        told.append(run.metrics)
    return told
