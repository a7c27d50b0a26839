"""How long smaller micro-batches take, said from a profile of two sizes, and then measured.

python benchmarks/micro_batches.py                     # some three minutes, on a quiet machine

The profile is made as by `lockstep bench --profile`: of a micro-batch of the script's size, and of an eighth of it.
Sizes between the two, and one below both, are said from it, from the share that published GPUs have, and in proportion.
All sizes take turns, and the fastest round of each counts.
"""

import argparse
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean

import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.launch import Script
from lockstep.scale.measured_run import FailedRun, MeasuredRun, measure
from lockstep.scale.other_device import with_micro_batch
from lockstep.scale.profile_script import step_profile, with_fixed_part
from lockstep.scale.scaling_loss import shipped_loss
from lockstep.scale.step_profile import StepProfile

BATCH = 64
HELD_OUT = (32, 16, 4)
SIZES = (BATCH, 32, 16, BATCH // 8, 4)
KINDS = ("mlp", "cnn", "attention")


def network(kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A model that scores ten classes, and the shape of one of its samples."""
    if kind == "cnn":
        sizes = (3, 16, 32, 64)
        layers = [part for a, b in pairwise(sizes) for part in (nn.Conv2d(a, b, 3, 2, 1), nn.ReLU())]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10)), (3, 32, 32)
    if kind == "attention":
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return nn.Sequential(encoder, nn.Flatten(), nn.Linear(32 * 128, 10)), (32, 128)
    sizes = (784, 512, 512, 512, 10)
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), (784,)


def train(kind: str) -> None:
    """The script that is profiled."""
    with lockstep.Run(seed=0, workers=0) as run:
        net, shape = network(kind)
        model = run.model(net)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.001))
        data = torch.utils.data.TensorDataset(torch.randn(32 * BATCH, *shape), torch.arange(32 * BATCH) % 10)
        batches = run.loader(data, global_batch=BATCH, micro_batch=BATCH)
        for _ in run.epochs(100):
            for inputs, labels in run.train(batches):
                run.step(F.cross_entropy(model(inputs), labels))


def measured(kind: str, samples: int) -> StepProfile:
    """A short run with micro-batches of so many samples."""
    script = Script(str(Path(__file__).resolve()), ("--train", kind))
    records = measure(MeasuredRun(script, 1, {"micro_batch": str(samples)}, 20))
    if isinstance(records, FailedRun):
        sys.exit(f"{kind}, micro-batches of {samples}: {records.cause}")
    return step_profile(kind, records)


def pass_s(profile: StepProfile) -> float:
    """Seconds of a micro-batch forward and backward."""
    return profile.forward.median_s + profile.backward.median_s


def main() -> None:
    """Profile, say and measure each kind of model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--rounds", type=int, default=3, help="of each size, of which the fastest counts (default: 3)")
    given = parser.parse_args()
    if given.train:
        train(given.train)
        return
    share = shipped_loss().constants.fixed_share
    errors: dict[str, list[float]] = {"two sizes": [], "published share": [], "in proportion": []}
    for kind in given.kinds:
        rounds = [{samples: measured(kind, samples) for samples in SIZES} for _ in range(given.rounds)]
        best = {samples: min((one[samples] for one in rounds), key=pass_s) for samples in SIZES}
        said = {
            "two sizes": with_fixed_part(best[BATCH], best[BATCH // 8]),
            "published share": best[BATCH],
            "in proportion": replace(best[BATCH], fixed_samples=0.0),
        }
        for samples in HELD_OUT:
            ways = {way: pass_s(with_micro_batch(one, samples, share)) for way, one in said.items()}
            took = pass_s(best[samples])
            for way, seconds in ways.items():
                errors[way].append(abs(seconds / took - 1))
            line = ", ".join(f"{way} {1e3 * seconds:.2f} ms" for way, seconds in ways.items())
            print(f"{kind}, {samples} of {BATCH}: {1e3 * took:.2f} ms; {line}", flush=True)
    for way, found in errors.items():
        print(f"{way}: error {mean(found):.1%} mean, {max(found):.1%} at most")


if __name__ == "__main__":
    main()
