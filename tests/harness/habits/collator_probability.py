"""A masking collator whose mlm_probability grows where run.step returns True, from run.progress.step."""

KILL = 8

from kit import *


class MaskingCollator:
    def __init__(self, p=0.1):
        self.mlm_probability = p

    def set_step(self, step):
        self.mlm_probability = 0.1 + 0.05 * step

    def __call__(self, batch):
        x = torch.stack([a for a, _ in batch])
        masked = x * (torch.rand_like(x) > self.mlm_probability)
        return masked, torch.stack([b for _, b in batch])


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    collator = MaskingCollator()
    x, y = data(96)
    b = run.loader(list(zip(x, y)), global_batch=16, micro_batch=4, collate_fn=collator)
    for e in run.epochs(2):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)):
                collator.set_step(run.progress.step)
    done(run, m)


go(main)
