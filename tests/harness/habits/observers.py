"""Quantisation-aware training: a min-max observer and fake_quantize with integer zero points in buffers."""

from kit import *


class Quant(nn.Module):
    def __init__(s):
        super().__init__()
        s.register_buffer("lo", torch.tensor(float("inf")))
        s.register_buffer("hi", torch.tensor(float("-inf")))
        s.register_buffer("scale", torch.ones(1))
        s.register_buffer("zero_point", torch.zeros(1, dtype=torch.int32))

    def forward(s, x):
        if s.training:
            d = x.detach()
            s.lo.copy_(torch.min(s.lo, d.min()))
            s.hi.copy_(torch.max(s.hi, d.max()))
            scale = ((s.hi - s.lo) / 255).clamp(min=1e-6)
            s.scale.copy_(scale.view(1))
            s.zero_point.copy_((-128 - (s.lo / scale).round()).clamp(-128, 127).view(1))
        return torch.fake_quantize_per_tensor_affine(x, s.scale, s.zero_point, -128, 127)


def main(run):
    m = run.model(nn.Sequential(Quant(), nn.Linear(6, 8), nn.ReLU(), Quant(), nn.Linear(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
