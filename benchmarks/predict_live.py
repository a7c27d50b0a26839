"""What `lockstep predict` says of two hosts with a slow link between them, and what is then measured on them.

python benchmarks/predict_live.py                                                    # some twenty minutes
python benchmarks/predict_live.py --speeds 500mbit --models mlp --buckets 1 25 --steps 8 --rounds 1

Each host is a namespace of this machine (see `hosts.py`), with one rank and a link of the speed that is named. First
each of the two computes alone, both at once, since they share this machine's cores and caches: that is the profile.
Then sums of nineteen sizes: ten are the link profile, the nine between them are held out. From these two the simulator
tells the step of each bucket size and of each strategy, before any is measured. The variants then take turns.

A choice counts as right if what was said to be fastest is measured to be so, or no slower than that by more than
the noise of the two, which is the half widths of their 95 % intervals together. Needs root and iproute2, and a quiet
machine: two cores for the ranks, and nothing else that wants them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from hosts import Host, Hosts, hosts
from lockstep.cpu_affinity import usable_cpus
from lockstep.cpu_use import CpuWatch
from lockstep.launch_contract import MEASURE
from lockstep.scale.bench_result import RoundSeen, measured
from lockstep.scale.catalogue import open_catalogue
from lockstep.scale.links import Curve, Link
from lockstep.scale.measured_run import Records
from lockstep.scale.profile_script import SUM_BYTES, step_profile
from lockstep.scale.simulated_strategy import SimulatedStrategy
from lockstep.scale.simulator import simulate
from lockstep.scale.step_profile import LinkProfile, StepProfile
from lockstep.scale.systems import System
from lockstep.step_record import MeasureRequest, RankRecord
from lockstep.world import World

BATCH = {"mlp": 256, "cnn": 32}  # samples of a rank's step, one micro-batch
STRATEGIES = ("ddp", "ddp:compress=fp16", "ddp:compress=powersgd", "local-sgd:period=8")
_NOISE_S = 1e-4
_BITS = {"mbit": 1e6, "gbit": 1e9}


class Cnn(nn.Module):
    """Four convolutions and a classifier that holds most of the 13 MB of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(32, 50, 3, padding=1, stride=2),
            nn.ReLU(),
        )
        self.head, self.last = nn.Linear(50 * 8 * 8, 1000), nn.Linear(1000, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of ten classes."""
        return self.last(F.relu(self.head(self.convolutions(images).flatten(1))))


def network(kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A model and the shape of one of its samples: `mlp` with 21 MB of gradients in six layers, or `cnn`."""
    if kind == "cnn":
        return Cnn(), (3, 32, 32)
    sizes = (784, 1024, 1024, 1024, 1024, 1024, 10)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), (784,)


def train(kind: str, steps: int) -> None:
    """On a rank: the script that is profiled, predicted and measured."""
    with lockstep.Run(seed=0, workers=0) as run:
        net, shape = network(kind)
        model = run.model(net)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9))
        samples = torch.randn(4 * BATCH[kind] * run.world_size, *shape)
        data = torch.utils.data.TensorDataset(samples, torch.arange(len(samples)) % 10)
        batches = run.loader(data, global_batch=BATCH[kind] * run.world_size, micro_batch=BATCH[kind])
        for _ in run.steps(steps + 1):
            for images, labels in run.train(batches):
                run.step(F.cross_entropy(model(images), labels))


class Machines:
    """Two hosts with a link of one speed between them."""

    def __init__(self, machines: Hosts, speed: str, options: argparse.Namespace) -> None:
        self._places = [machines["n1"], machines["n2"]]
        self._options = options
        number, unit = float(speed[:-4]), speed[-4:]
        # A bucket that holds what the link sends between two ticks of the kernel, or it would be slower than it says.
        burst_kb = max(32, int(1.5 * number * _BITS[unit] / 8 / 250 / 1024))
        for place in self._places:
            place.slow(speed, f"{burst_kb}kb")

    def alone(self, kind: str) -> StepProfile:
        """The profile of one rank, while the other host's rank computes the same by itself."""
        found = self._run(kind, {}, together=False, gradients=True)
        return step_profile(f"{kind}.py", Records(found[:1]))

    def sums(self, sizes: Sequence[int]) -> list[tuple[int, float]]:
        """Bytes and seconds of sums between the two."""
        return list(self._run("mlp", {}, steps=2, sum_bytes=tuple(sizes))[0].sums)

    def together(self, kind: str, settings: Mapping[str, str]) -> RoundSeen:
        """One round of a variant."""
        watch = CpuWatch(usable_cpus())
        found = self._run(kind, settings)
        return RoundSeen(Records(found), watch.used(0.0))

    def _run(
        self, kind: str, settings: Mapping[str, str], *, together: bool = True, steps: int | None = None, **asked: Any
    ) -> tuple[RankRecord, ...]:
        count = steps or self._options.steps
        worlds = [
            World(rank, 2, 0, 1, rank, 2, address="n1", port=29500) if together else World(0, 1, 0, 1, 0, 1)
            for rank in range(2)
        ]
        with tempfile.TemporaryDirectory() as place:
            requests = [MeasureRequest(str(Path(place, str(rank))), count, **asked) for rank in range(2)]
            started = [
                _start(host, world, request, kind, settings, self._options)
                for host, world, request in zip(self._places, worlds, requests, strict=True)
            ]
            said = [rank.communicate()[1] for rank in started]
            if any(rank.returncode for rank in started):
                sys.exit(f"{kind} {dict(settings)}: {''.join(said)[-2000:]}")
            return tuple(
                RankRecord.read(request.record(rank if together else 0)) for rank, request in enumerate(requests)
            )


def _start(
    host: Host,
    world: World,
    request: MeasureRequest,
    kind: str,
    settings: Mapping[str, str],
    options: argparse.Namespace,
) -> subprocess.Popen[str]:
    home = os.pathsep.join((str(Path(lockstep.__file__).parents[1]), str(Path(__file__).parent)))
    given = {f"LOCKSTEP_{name.upper()}": value for name, value in settings.items()}
    env = os.environ | {"PYTHONPATH": home, "OMP_NUM_THREADS": "1", "LOCKSTEP_VIEW": "silent"}
    env |= {**given, MEASURE: request.to_text(), **(world.rank_variables() if world.size > 1 else {})}
    told = ("--train", kind, "--steps", str(request.steps))
    return host.start([sys.executable, __file__, *told], cwd=Path.cwd(), env=env, stderr=subprocess.PIPE)


def held_out() -> list[int]:
    """Sizes between those of a link profile, each in the middle of two by ratio."""
    return [int((a * b) ** 0.5) // 4 * 4 for a, b in pairwise(SUM_BYTES)]


def link_of(sums: Sequence[tuple[int, float]]) -> tuple[LinkProfile, list[float]]:
    """The link profile from every second size, and the relative errors of its curve at the others."""
    known = [each for each in sums if each[0] in SUM_BYTES]
    sizes, seconds = zip(*known, strict=True)
    curve = Curve(2, tuple(map(float, sizes)), seconds)
    errors = [curve.at(size) / took - 1 for size, took in sums if size not in SUM_BYTES and size < sizes[-1]]
    return LinkProfile(2, 2, "gloo", sizes, seconds), errors


def settings_of(strategy: str, bucket_mb: float) -> dict[str, str]:
    """The settings of a variant."""
    return {"strategy": strategy, "bucket_mb": f"{bucket_mb:g}"}


def visit(machines: Machines, kind: str, link: LinkProfile, options: argparse.Namespace) -> list[dict[str, Any]]:
    """For each variant of a model, what was said of it and what was measured."""
    profile = machines.alone(kind)
    cpu = open_catalogue().gpu("cpu")
    between = Link.measured(link, "between")
    system = System(cpu, 2, 1, between, between)
    variants = [("ddp", bucket) for bucket in options.buckets]
    variants += [(strategy, 25.0) for strategy in options.strategies if strategy != "ddp"]
    said = {
        (strategy, bucket): simulate(profile, system, SimulatedStrategy.parse(strategy, bucket_mb=bucket, device="cpu"))
        for strategy, bucket in variants
    }
    seen: dict[tuple[str, float], list[RoundSeen]] = {variant: [] for variant in variants}
    for number in range(options.rounds):
        for strategy, bucket in variants[number:] + variants[:number]:
            seen[strategy, bucket].append(machines.together(kind, settings_of(strategy, bucket)))
    rows = []
    for (strategy, bucket), rounds in seen.items():
        found = measured(rounds)
        if found is None:
            sys.exit(f"{kind}, {strategy}: no step counts; give more --steps")
        # Every period-th step of local SGD communicates: the mean counts, not the median.
        by_mean = sum(found.parts_s.values())
        took = by_mean if strategy.startswith("local") else found.step_s.median
        rows.append(
            {
                "model": kind,
                "strategy": strategy,
                "bucket_mb": bucket,
                "said_s": said[strategy, bucket].seconds,
                "took_s": took,
                "noise_s": (found.step_s.high - found.step_s.low) / 2,
                "parts_s": dict(found.parts_s),
                "alone_s": profile.forward.median_s + profile.backward.median_s,
            }
        )
    return rows


def right(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether the row that was said to be fastest is so, within the noise."""
    said, took = min(rows, key=lambda row: row["said_s"]), min(rows, key=lambda row: row["took_s"])
    return bool(said["took_s"] - took["took_s"] <= said["noise_s"] + took["noise_s"] + _NOISE_S)


def best_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each strategy: `ddp` with the bucket that was said to be best for it."""
    buckets = [row for row in rows if row["strategy"] == "ddp"]
    return [min(buckets, key=lambda row: row["said_s"]), *(row for row in rows if row["strategy"] != "ddp")]


def show(speed: str, link_errors: Sequence[float], rows: Sequence[dict[str, Any]]) -> None:
    """Print what was found at one speed."""
    percent = [100 * abs(error) for error in link_errors]
    print(
        f"\n{speed}: sums of held-out sizes: mean error {statistics.fmean(percent):.1f} %, worst {max(percent):.1f} %"
    )
    print("| model | strategy | bucket, MiB | said, ms | measured, ms | error, % |\n|---|---|---|---|---|---|")
    for row in rows:
        error = 100 * (row["said_s"] / row["took_s"] - 1)
        print(
            f"| {row['model']} | {row['strategy']} | {row['bucket_mb']:g} | {1e3 * row['said_s']:.1f} | "
            f"{1e3 * row['took_s']:.1f} +- {1e3 * row['noise_s']:.1f} | {error:+.1f} |"
        )


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all speeds and models: mean error over buckets, and how often the best one was known."""
    groups = [[row for row in one["rows"] if row["model"] == kind] for one in found for kind in BATCH]
    groups = [group for group in groups if group]
    by_bucket = [[row for row in group if row["strategy"] == "ddp"] for group in groups]
    errors = [abs(row["said_s"] / row["took_s"] - 1) for rows in by_bucket for row in rows]
    held = [abs(error) for one in found for error in one["link_errors"]]
    return {
        "mean_error": statistics.fmean(errors),
        "worst_error": max(errors),
        "best_bucket_right": sum(map(right, by_bucket)),
        "best_strategy_right": sum(right(best_of(group)) for group in groups),
        "of": len(groups),
        "sums_mean_error": statistics.fmean(held),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", nargs="+", default=["200mbit", "500mbit", "1gbit"])
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn"], choices=tuple(BATCH))
    parser.add_argument("--buckets", nargs="+", type=float, default=[1.0, 2.5, 5.0, 10.0, 25.0], help="MiB")
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), help="beside ddp")
    parser.add_argument("--steps", type=int, default=24, help="of each round; local SGD needs some periods")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", choices=tuple(BATCH), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.steps)
        return
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the load is {load:.1f} before anything began; figures will be off", file=sys.stderr)
    found = []
    with hosts(2) as world:
        for speed in options.speeds:
            machines = Machines(world, speed, options)
            link, errors = link_of(machines.sums(sorted([*SUM_BYTES, *held_out()])))
            rows = [row for kind in options.models for row in visit(machines, kind, link, options)]
            found.append({"speed": speed, "link_errors": errors, "rows": rows})
            show(speed, errors, rows)
    result: dict[str, Any] = {"speeds": found, "summary": summary(found), "load": load}
    told = result["summary"]
    print(
        f"\nmean error over bucket sizes {told['mean_error']:.1%}, worst {told['worst_error']:.1%}; held-out sums "
        f"{told['sums_mean_error']:.1%}\nthe best bucket was known in {told['best_bucket_right']} of {told['of']}, the "
        f"best strategy in {told['best_strategy_right']}"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
