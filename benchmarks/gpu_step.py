"""What a step costs on one GPU: under Lockstep, and in plain torch with and without deterministic kernels.

python benchmarks/gpu_step.py
python benchmarks/gpu_step.py --models gpt2 --rounds 5 --json gpu_step.json

Each way trains the same model on the same samples, which are on the GPU, in bf16 with AdamW, in one process. The ways
take turns: a round is a block of steps of each, in an order that changes from round to round, and ratios are taken
within a round: of the median step of a block, which the GPU's own clock measures, and of all of them together. The
first steps of a block, in which kernels are loaded and Lockstep checks the loop, are not measured.
A last block of each way counts what a step launches, and where the host waits for the GPU. Without a GPU, sizes are
tiny, and the counts mean nothing.
"""

import argparse
import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
WARM_UP = 8  # steps of a block
COUNTED = 3  # steps


class Bottleneck(nn.Module):
    """One block of a ResNet."""

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(into, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        shortcut = [nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out)]
        self.shortcut = nn.Sequential(*(shortcut if into != out or stride > 1 else []))

    def forward(self, x: Tensor) -> Tensor:
        """From images of shape (samples, channels, height, width) to images of 4 ``width`` channels."""
        return F.relu(self.body(x) + self.shortcut(x))


def resnet50(width: int = 64) -> nn.Module:
    """161 parameters, 25.6 million numbers, 53 BatchNorms."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    into = width
    for level, count in enumerate((3, 4, 6, 3)):
        for number in range(count):
            layers.append(Bottleneck(into, width << level, 2 if level and not number else 1))
            into = 4 * (width << level)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 1000))


class Block(nn.Module):
    """One layer of GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.one, self.two = max(1, width // 64), nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """From and to shape (samples, words, width)."""
        q, k, v = self.qkv(self.one(x)).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        hidden: Tensor = x + self.mlp(self.two(x))
        return hidden


class Gpt2(nn.Module):
    """GPT-2 small: 148 parameters, 124 million numbers."""

    def __init__(self, width: int = 768, layers: int = 12, words: int = 50257, length: int = 1024) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.Sequential(*(Block(width) for _ in range(layers))), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """From numbers of words, of shape (samples, words), to a logit for each word that may follow."""
        hidden = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits: Tensor = self.norm(self.blocks(hidden)).flatten(0, 1) @ self.words.weight.t()
        return logits


class Task(NamedTuple):
    """What is trained, with the micro-batches of one step."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Tensor
    labels: Tensor
    parts: int  # micro-batches


def task(name: str, parts: int) -> Task:
    """Of a batch of 64 images, or of 8 texts of 1024 words, that is divided into so many micro-batches."""
    torch.manual_seed(0)
    if name == "resnet50":
        samples, width, side = (64 // parts, 64, 224) if ON_GPU else (2, 4, 32)
        images = torch.randn(samples, 3, side, side, device=DEVICE)
        return Task(name, lambda: resnet50(width), images, torch.randint(1000, (samples,), device=DEVICE), parts)
    samples, shape = (8 // parts, (768, 12, 50257, 1024)) if ON_GPU else (1, (16, 1, 50, 8))
    words = torch.randint(shape[2], (samples, shape[3] + 1), device=DEVICE)
    return Task(name, lambda: Gpt2(*shape), words[:, :-1], words[:, 1:].flatten(), parts)


class Watch:
    """Counts the steps of a block, and takes the time of those after the warm-up, or what they launch and wait for."""

    def __init__(self, steps: int, counts: bool = False) -> None:
        self.steps, self.counts = steps, counts
        self.step_s = self.mean_s = 0.0  #: the median step, and the mean one
        self.launches = self.waits = 0.0
        self._done = 0
        self._marks: list[Any] = []  # between steps
        self._counting = contextlib.ExitStack()

    def step(self) -> bool:
        """A step is done: whether it was the last one."""
        self._done += 1
        if self._done == WARM_UP:
            self._synchronize()
            if self.counts:
                self._count()
        if self._done >= WARM_UP:
            self._marks.append(self._now())
        if self._done < WARM_UP + self.steps:
            return False
        self._counting.close()
        self._synchronize()
        times = [_seconds(*pair) for pair in pairwise(self._marks)]
        self.step_s, self.mean_s = median(times), sum(times) / self.steps
        return True

    def _now(self) -> Any:
        if not ON_GPU:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _count(self) -> None:
        caught = self._counting.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        activities = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * ON_GPU]
        profile = torch.profiler.profile(activities=activities)

        def read() -> None:
            self._debug("default")
            self._synchronize()
            profile.stop()
            launched = (
                e.count for e in profile.key_averages() if e.key.startswith(("cudaLaunch", "cuLaunch", "cudaMem"))
            )
            self.launches = sum(launched) / self.steps
            self.waits = sum("synchronizing" in str(each.message) for each in caught) / self.steps

        self._counting.callback(read)
        profile.start()
        self._debug("warn")

    def _debug(self, mode: str) -> None:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode(mode)

    def _synchronize(self) -> None:
        if ON_GPU:
            torch.cuda.synchronize()


def _seconds(begin: Any, end: Any) -> float:
    seconds: float = begin.elapsed_time(end) / 1e3 if ON_GPU else end - begin
    return seconds


@contextlib.contextmanager
def kernels(*, deterministic: bool) -> Iterator[None]:
    """Within, torch takes deterministic kernels, as in a backward pass under Lockstep, or not."""
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def by_hand(given: Task, watch: Watch, *, deterministic: bool) -> None:
    """A loop of bare PyTorch."""
    with kernels(deterministic=deterministic):
        torch.manual_seed(0)
        net = given.make().to(DEVICE)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
        while True:
            for _ in range(given.parts):
                with torch.autocast(DEVICE.type, torch.bfloat16):
                    loss = F.cross_entropy(net(given.inputs), given.labels)
                (loss / given.parts).backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch.step():
                return


def under_lockstep(given: Task, watch: Watch) -> None:
    """The same loop under `lockstep.Run`."""
    samples = len(given.inputs)
    steps = WARM_UP + watch.steps
    with lockstep.Run(seed=0, precision="bf16", track="none") as run:
        net = run.model(given.make())
        run.optimizer(torch.optim.AdamW(net.parameters(), lr=1e-4))
        batch = samples * given.parts
        numbers = run.loader(torch.arange(steps * batch), global_batch=batch, micro_batch=samples)
        for _ in run.train(numbers):
            if run.step(F.cross_entropy(net(given.inputs), given.labels)):
                watch.step()


WAYS: dict[str, Callable[[Task, Watch], None]] = {
    "plain": lambda given, watch: by_hand(given, watch, deterministic=False),
    "deterministic": lambda given, watch: by_hand(given, watch, deterministic=True),
    "lockstep": under_lockstep,
}


def measure(given: Task, rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """For each way, seconds of a step round by round, and what a step launches and how often its host waits."""
    found: dict[str, dict[str, list[float]]] = {way: {"step_s": [], "mean_s": []} for way in WAYS}
    for number in range(rounds):
        for way in list(WAYS)[:: 1 if number % 2 == 0 else -1]:
            watch = Watch(steps)
            WAYS[way](given, watch)
            found[way]["step_s"].append(watch.step_s)
            found[way]["mean_s"].append(watch.mean_s)
    for way, train in WAYS.items():
        watch = Watch(COUNTED, counts=True)
        train(given, watch)
        found[way] |= {"launches": [watch.launches], "waits": [watch.waits]}
    return found


def table(given: Task, found: dict[str, dict[str, list[float]]]) -> str:
    """For people: medians of times, and of the ratios within a round with their spread."""
    lines = [f"| {given.name}, micro-batches: {given.parts} | ms | x plain | from | to | mean | launches | waits |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for way, seen in found.items():
        step, mean = (
            sorted(a / b for a, b in zip(seen[name], found["plain"][name], strict=True))
            for name in ("step_s", "mean_s")
        )
        times = f"{median(seen['step_s']) * 1e3:.2f} | {median(step):.3f} | {step[0]:.3f} | {step[-1]:.3f}"
        counts = f"{seen['launches'][0]:.0f} | {seen['waits'][0]:.1f}"
        lines.append(f"| {way} | {times} | {median(mean):.3f} | {counts} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=("gpt2", "resnet50"), default=["gpt2", "resnet50"])
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 4], help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=25, help="of a block, after its warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    seen = {}
    for name in options.models:
        for parts in options.parts:
            given = task(name, parts)
            seen[f"{name}, {parts}"] = found = measure(given, options.rounds, options.steps)
            print(table(given, found), end="\n\n", flush=True)
    where = torch.cuda.get_device_name(0) if ON_GPU else "CPU"
    print(f"{where}, torch {torch.__version__}")
    if options.json:
        Path(options.json).write_text(json.dumps({"torch": torch.__version__, "device": where, "seen": seen}, indent=2))


if __name__ == "__main__":
    main()
