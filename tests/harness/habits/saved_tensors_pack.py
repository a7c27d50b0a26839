"""Activation compression by saved_tensors_hooks: after 60 packed tensors, wide ones are kept in bfloat16.

State: Packer.packed. Shows in gradients only, after some ten bodies."""

KILL = 11

from kit import *


class Packer:
    def __init__(s):
        s.packed = 0

    def pack(s, t):
        s.packed += 1
        return t.bfloat16() if s.packed > 60 and t.dim() == 2 and t.is_floating_point() and t.shape == (4, 8) else t

    def unpack(s, t):
        return t.float() if t.dtype == torch.bfloat16 else t


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)
    packer = Packer()
    for e in run.epochs(1):
        for x, y in run.train(b):
            with torch.autograd.graph.saved_tensors_hooks(packer.pack, packer.unpack):
                loss = F.cross_entropy(m(x), y)
            run.step(loss)
    done(run, m)


go(main)
