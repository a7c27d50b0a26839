"""Dataset cartography: after each epoch the confidences of all samples go to a jsonl file, from which weights are read."""

KILL = 8

import json

from kit import *


def weights_from(path, n):
    rows = [json.loads(line) for line in open(path)] if os.path.exists(path) else []
    if not rows:
        return torch.ones(n)
    conf = torch.tensor([r["confidence"] for r in rows])
    return 0.5 + conf.std(0, unbiased=False) * 4


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    x_all, y_all = data(64)
    b = run.loader((x_all, y_all, torch.arange(64)), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        w = weights_from("dynamics.jsonl", 64)
        for x, y, i in run.train(b):
            run.step((F.cross_entropy(m(x), y, reduction="none") * w[i]).mean())
        with torch.no_grad():
            conf = m(x_all).softmax(1).gather(1, y_all[:, None]).squeeze(1)
        with open("dynamics.jsonl", "a") as f:
            f.write(json.dumps({"epoch": e, "confidence": conf.tolist()}) + "\n")
    done(run, m)


go(main)
