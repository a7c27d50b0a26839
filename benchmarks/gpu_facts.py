"""Facts about torch's kernels on a GPU that equal bits and the speed of a step stand on. Half a minute; needs a GPU.

python benchmarks/gpu_facts.py
python benchmarks/gpu_facts.py --json gpu_facts.json

A line for each fact: which backward pass of attention repeats its bits, and what that costs; which sums have other bits
where a tensor begins elsewhere in memory; which optimizers step some rows of a parameter as they step all of it; what a
look for numbers that are not finite takes, and the sums of many ranks.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

REPEATS = 10

#: Of each fact, what it is about, and what was found.
Facts = Iterator[tuple[str, str]]


def milliseconds(work: Callable[[], object], times: int = 20) -> float:
    """Of the GPU and of what it waits for, for one of so many calls."""
    for _ in range(3):
        work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed / times


def gradients(inputs: list[Tensor], weight: Tensor, ways: list[SDPBackend], strict: tuple[bool, bool]) -> list[Tensor]:
    """Of attention, by the first of the ``ways`` that torch can take; ``strict``: the forward and the backward pass."""
    torch.use_deterministic_algorithms(True, warn_only=not strict[0])
    query, key, value = inputs
    with sdpa_kernel(ways):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.use_deterministic_algorithms(True, warn_only=not strict[1])
    return list(torch.autograd.grad(out, inputs, weight))


def attention(device: torch.device) -> Facts:
    """The gradient of attention by torch's ways: with deterministic kernels wanted, and with others refused."""
    flash, efficient, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
    ways = {"any": [cudnn, flash, efficient], "flash": [flash], "memory-efficient": [efficient], "cuDNN": [cudnn]}
    refusing = {"nowhere": (False, False), "in the backward pass": (False, True), "everywhere": (True, True)}
    for dtype in (torch.bfloat16, torch.float32):
        *inputs, weight = (torch.randn(4, 16, 2048, 64, device=device, dtype=dtype) for _ in range(4))
        for where, strict in refusing.items():
            for name, backends in ways.items():
                work = partial(gradients, [each.requires_grad_() for each in inputs], weight, backends, strict)
                what = f"attention in {str(dtype).removeprefix('torch.')}, {name}, others refused {where}"
                try:
                    first = work()
                    odd = sum(not all(map(torch.equal, first, work())) for _ in range(REPEATS))
                    yield what, f"other bits {odd} times of {REPEATS}, {milliseconds(work, 5):.2f} ms"
                except RuntimeError:
                    yield what, "torch has no kernel"
    torch.use_deterministic_algorithms(False)


def places(device: torch.device) -> Facts:
    """What has other bits where a tensor begins 4 bytes later: sums, for which gradients keep their place in memory."""
    work: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": torch.sum,
        "norm": torch.linalg.vector_norm,
        "softmax": lambda x: x.softmax(0),
        "product of matrices": lambda x: x[: 1 << 18].view(512, 512) @ x[: 1 << 18].view(512, 512),
    }
    own = torch.randn(1_000_003, device=device)
    moved = torch.empty(len(own) + 1, device=device)[1:].copy_(own)
    for name, call in work.items():
        yield f"{name}, 4 bytes further in memory", "same bits" if torch.equal(call(own), call(moved)) else "other bits"


def rows(device: torch.device) -> Facts:
    """Whether an optimizer steps rows of a parameter as it steps all of it."""
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "SGD": partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
        "Adam": torch.optim.Adam,
        "Adam with weight decay": partial(torch.optim.Adam, weight_decay=0.01),
        "AdamW": partial(torch.optim.AdamW, weight_decay=0.01),
    }
    for name, kind in kinds.items():
        for how in ("foreach", "fused"):
            odd = 0
            for shape, begin, end in (((1001, 7), 143, 286), ((1000, 8), 100, 203), ((4000, 33), 1, 2001)):
                whole = nn.Parameter(torch.randn(*shape, device=device))
                part = nn.Parameter(whole.detach()[begin:end].clone())
                optimizers = [kind([p], lr=0.1, **{how: True}) for p in (whole, part)]
                for _ in range(10):
                    whole.grad = torch.randn_like(whole)
                    part.grad = whole.grad[begin:end].clone()
                    for optimizer in optimizers:
                        optimizer.step()
                odd += not torch.equal(whole[begin:end], part)
            yield f"rows under {name}, {how}", f"other bits in {odd} of 3 shapes" if odd else "same bits"


def lists(device: torch.device) -> Facts:
    """What lists of tensors save."""
    gradients = [torch.randn(size, device=device) for size in (64, 4096, 65536, 1_000_000) * 40]

    def one_by_one() -> Tensor:
        return torch.stack([each.sum().abs() for each in gradients]).sum().isfinite()

    def at_once() -> Tensor:
        return torch.stack(torch._foreach_norm(gradients, math.inf)).max().isfinite()

    for name, call in (("one by one", one_by_one), ("at once", at_once)):
        yield f"whether 160 gradients are finite, {name}", f"{milliseconds(call):.2f} ms"
    for ranks in (8, 64):
        received = torch.randn(ranks, (25 << 20) // 4 // ranks, device=device)

        def fold(received: Tensor = received) -> None:
            parts = list(received.unbind())
            while len(parts) > 1:
                for left, right in zip(parts[::2], parts[1::2], strict=True):
                    left.add_(right)
                parts = parts[::2]

        def by_levels(received: Tensor = received) -> None:
            parts = list(received.unbind())
            while len(parts) > 1:
                torch._foreach_add_(parts[::2], parts[1::2])
                parts = parts[::2]

        for name, sums in (("one by one", fold), ("by levels", by_levels)):
            yield f"25 MiB of {ranks} ranks added up, {name}", f"{milliseconds(sums):.3f} ms"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the facts there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here")
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    found = {}
    for about in (attention, places, rows, lists):
        for what, fact in about(device):
            found[what] = fact
            print(f"{what}: {fact}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
