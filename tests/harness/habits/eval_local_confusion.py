"""Wrong: a confusion matrix is counted by each rank in its own evaluation (no run.sum) and shifts logits each 6th step."""

KILL = 11

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, lr=0.05))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    v = run.loader(data(96), global_batch=16, micro_batch=4, shuffle=False)
    confusion = np.zeros((3, 3), dtype=np.int64)
    for e in run.epochs(3):
        for x, y in run.train(b):
            out = m(x)
            if e and run.progress.step % 6 == 4:
                prior = torch.from_numpy(confusion.sum(0) / confusion.sum()).float()
                out = out + 0.5 * (prior + 0.01).log()
            run.step(F.cross_entropy(out, y))
        for x, y in run.evaluate(v):
            np.add.at(confusion, (y.numpy(), m(x).argmax(1).numpy()), 1)
    done(run, m)


go(main)
