"""How fast samples come through `run.loader`, beside torch's DataLoader and torchdata's StatefulDataLoader.

python benchmarks/data.py
python benchmarks/data.py --parts images --workers 0 1 2 --rounds 20
python benchmarks/data.py --parts resume order stream

Nothing is trained but in the last part: what is timed is reading, decoding and collating on one rank. All ways read the
same files, and take turns: a round is one epoch of each, in an order that changes from round to round. A way whose
package is not installed is left out, and that is said. It prints tables, of medians with the least and the most of the
rounds, in about four minutes.

    images    a data set with an index that decodes JPEG files of 64 x 64
    tar       the same images in tar files: with known lengths, and as a stream of shards without
    parquet   rows of numbers in parquet files: a stream of `datasets`, divided by shard and not, and files of known
              lengths
    resume    the time to the first batch where nine tenths of an epoch are done
    order     what the order of a long epoch costs: time, and memory
    stream    what a step over a stream costs beside one over a data set with an index, on two ranks
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import io
import json
import random
import resource
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import lockstep
from lockstep.batch import BatchPlan
from lockstep.data import MicroBatchLoader, WorkerOptions, open_micro_batch_loader, open_order
from ranks import start, told

PARTS = ("images", "tar", "parquet", "resume", "order", "stream")
BATCH = 64  # samples of a batch, and of a micro-batch
SHARDS = 16
STEPS = 200  # of an epoch of the part `stream`

Way = Callable[[int], Iterator[Any]]
"""One pass over the data, in the epoch of that number: batches of `BATCH` samples."""

has_stateful = importlib.util.find_spec("torchdata") is not None
has_datasets = importlib.util.find_spec("datasets") is not None


# The data -------------------------------------------------------------------------------------------------------------


def write_images(place: Path, images: int) -> None:
    """JPEG files of noise that is smooth, as photographs are, each by itself and in tar files."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for shard in range(SHARDS):
        with tarfile.open(place / f"{shard:02}.tar", "w") as tar:
            for number in range(shard, images, SHARDS):
                coarse = Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8))
                file = place / f"{number:06}.jpg"
                coarse.resize((64, 64)).save(file, quality=90)
                tar.add(file, file.name)


def write_rows(place: Path, count: int) -> None:
    """Parquet files of 32 numbers a row, in groups of a hundred rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = np.random.default_rng(0)
    for shard in range(SHARDS):
        rows = draw.random((count // SHARDS, 32), dtype=np.float32)
        table = pa.table({"x": pa.array(list(rows)), "y": pa.array(rows[:, 0] > 0.5)})
        pq.write_table(table, place / f"{shard:02}.parquet", row_group_size=100)


def decoded(jpeg: bytes) -> torch.Tensor:
    """The pixels: float, channels first."""
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"), dtype=np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1).div_(255)


class Images(Dataset[torch.Tensor]):
    """Files, by index."""

    def __init__(self, place: Path) -> None:
        self.files = sorted(place.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return decoded(self.files[index].read_bytes())


class Tars:
    """Tar files as `run.loader` takes them."""

    def __init__(self, place: Path) -> None:
        self.files = sorted(place.glob("*.tar"))
        self.members: list[list[tuple[int, int]]] = []
        for file in self.files:
            with tarfile.open(file) as tar:
                self.members.append([(member.offset_data, member.size) for member in tar])
        self.shard_lengths = [len(members) for members in self.members]

    def read_shard(self, shard: int, start: int) -> Iterator[torch.Tensor]:
        """From ``start`` on, by a seek."""
        with open(self.files[shard], "rb") as file:
            for offset, size in self.members[shard][start:]:
                file.seek(offset)
                yield decoded(file.read(size))


class TarShards:
    """Tar files that are read one by one, without a word about how many samples they hold."""

    num_shards = SHARDS

    def __init__(self, tars: Tars) -> None:
        self.read_shard = tars.read_shard


class TarStream(IterableDataset[torch.Tensor]):
    """Tar files as one would iterate them for torch's loaders: shuffled, and divided among loader processes."""

    def __init__(self, tars: Tars) -> None:
        self.tars = tars
        self.epoch = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = random.Random(self.epoch).sample(range(SHARDS), SHARDS)
        for shard in order[number::workers]:
            yield from self.tars.read_shard(shard, 0)


class ParquetShards:
    """Parquet files as `run.loader` takes them: read through a stream of `datasets`, one shard at a time."""

    def __init__(self, place: Path) -> None:
        import pyarrow.parquet as pq

        self.stream = parquet_stream(place)
        self.shard_lengths = [pq.read_metadata(file).num_rows for file in sorted(place.glob("*.parquet"))]

    def read_shard(self, shard: int, start: int) -> Iterator[Any]:
        """From ``start`` on; `datasets` skips row groups without looking into them."""
        return iter(self.stream.shard(len(self.shard_lengths), shard).skip(start))


def parquet_stream(place: Path) -> Any:
    """The stream of `datasets` over the parquet files."""
    import datasets

    files = sorted(map(str, place.glob("*.parquet")))
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True).with_format("torch")


# The ways -------------------------------------------------------------------------------------------------------------


def lockstep_way(
    dataset: Any, workers: int, micro_batches: int, *, in_order: bool = False
) -> tuple[Way, MicroBatchLoader]:
    """Steps of so many micro-batches of `BATCH` samples, as a single rank gets them."""
    order = open_order(dataset, seed=0, shuffle=None)
    loader = open_micro_batch_loader(
        dataset,
        BatchPlan(BATCH * micro_batches, BATCH, 1),
        0,
        order=order,
        seed=0,
        drop_last=False,
        workers=WorkerOptions(workers),
        agree=lambda numbers: [numbers],
        shuffle=False if in_order else None,
    )
    return lambda epoch: (each.data for each in loader.epoch(epoch, padding="none")), loader


def torch_way(kind: type[DataLoader[Any]], dataset: Any, workers: int) -> Way:
    """Torch's loader, or one that has its arguments."""
    if isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset):
        loader = kind(dataset, batch_size=BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    else:
        loader = kind(dataset, batch_size=BATCH, num_workers=workers)

    def begin(epoch: int) -> Iterator[Any]:
        if isinstance(dataset, TarStream):
            dataset.epoch = epoch
        return iter(loader)

    return begin


def torch_kinds() -> dict[str, type[DataLoader[Any]]]:
    """Torch's own, and torchdata's where it is installed."""
    kinds: dict[str, type[DataLoader[Any]]] = {"DataLoader": DataLoader}
    if has_stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        kinds["StatefulDataLoader"] = StatefulDataLoader
    return kinds


def ways_of(part: str, place: Path, workers: int) -> dict[str, Way]:
    """The ways that are compared in ``part``, torch's DataLoader first."""

    def ours(dataset: Any, micro_batches: int = 8, *, in_order: bool = False) -> Way:
        return lockstep_way(dataset, workers, micro_batches, in_order=in_order)[0]

    by_torch: Any
    if part == "images":
        by_torch = Images(place)
        found = {"run.loader": ours(Images(place), 1), "run.loader, 8 a step": ours(Images(place))}
    elif part == "tar":
        tars = Tars(place)
        by_torch = TarStream(tars)
        found = {"run.loader, known lengths": ours(tars), "run.loader, shards": ours(TarShards(tars))}
    else:
        by_torch = parquet_stream(place)
        found = {
            "run.loader, known lengths": ours(ParquetShards(place)),
            "run.loader, shards": ours(by_torch),
            "run.loader, shuffle=False": ours(by_torch, in_order=True),
        }
    return {name: torch_way(kind, by_torch, workers) for name, kind in torch_kinds().items()} | found


# The parts ------------------------------------------------------------------------------------------------------------


def throughput(part: str, place: Path, workers: int, rounds: int) -> list[dict[str, Any]]:
    """Samples a second of each way, and how many times those of torch's DataLoader in the same round."""
    ways = ways_of(part, place, workers)
    seen: dict[str, list[float]] = {name: [] for name in ways}
    cpu_us: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, rounds):  # one to warm up
        turn = list(ways)
        for name in turn[number % len(turn) :] + turn[: number % len(turn)]:
            began, cpu_s, samples = time.perf_counter(), cpu_seconds(), 0
            for batch in ways[name](number + 1):
                samples += len(batch["y"] if isinstance(batch, dict) else batch)
            if number >= 0:
                seen[name].append(samples / (time.perf_counter() - began))
                cpu_us[name].append((cpu_seconds() - cpu_s) / samples * 1e6)
    return [
        {
            "part": part,
            "workers": workers,
            "way": name,
            "rate": median(rates),
            "least": min(rates),
            "most": max(rates),
            "ratios": sorted(rate / base for rate, base in zip(rates, seen["DataLoader"], strict=True)),
            "cpu_us": median(cpu_us[name]),
            "cpu_ratio": median(own / base for own, base in zip(cpu_us[name], cpu_us["DataLoader"], strict=True)),
        }
        for name, rates in seen.items()
    ]


def cpu_seconds() -> float:
    """Of this process and of its loader processes, those that have ended too."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = [process.cpu_times() for process in psutil.Process().children()]
    own = sum(times.user + times.system for times in running)
    return time.process_time() + ended.ru_utime + ended.ru_stime + own


def resume(place: Path, rounds: int) -> list[dict[str, Any]]:
    """Seconds to the first batch of the last tenth of an epoch: as each way would resume, without loader processes."""
    images, tars = Images(place), Tars(place)
    # Made anew for each way: a stream of `datasets` keeps the state that it was given.
    sources: dict[str, Callable[[], Any]] = {"images": lambda: images, "tar": lambda: TarStream(tars)}
    ours: dict[str, dict[str, Any]] = {
        "images": {"run.loader": images},
        "tar": {"run.loader, known lengths": tars, "run.loader, shards": TarShards(tars)},
    }
    if has_datasets and any(place.glob("*.parquet")):
        sources["parquet"] = partial(parquet_stream, place)
        ours["parquet"] = {"run.loader, shards": parquet_stream(place)}

    def skipped(dataset: Any, batches: int) -> None:
        """Torch's loader keeps no state: it reads the batches before that one again."""
        found = torch_way(DataLoader, dataset, 0)(0)
        for _ in range(batches + 1):
            next(found)

    ways: dict[tuple[str, str], Callable[[], object]] = {}
    for data, make in sources.items():
        samples = sum(tars.shard_lengths) if data != "parquet" else rows_of(place)
        batches = samples // BATCH * 9 // 10 // 8 * 8
        ways[data, "DataLoader, read again"] = partial(skipped, make(), batches)
        if has_stateful:
            ways[data, "StatefulDataLoader"] = stateful_resume(make(), data, batches)
        for name, own in ours[data].items():
            ways[data, name] = own_resume(own, batches // 8)
    seen: dict[tuple[str, str], list[float]] = {each: [] for each in ways}
    for _ in range(rounds):
        for each, way in ways.items():
            began = time.perf_counter()
            way()
            seen[each].append(time.perf_counter() - began)
    return [
        {"data": data, "way": way, "seconds": median(s), "least": min(s), "most": max(s)}
        for (data, way), s in sorted(seen.items())
    ]


def stateful_resume(dataset: Any, data: str, batches: int) -> Callable[[], object]:
    """Of torchdata's loader, with the state that it had after so many ``batches``."""
    make = partial(torch_kinds()["StatefulDataLoader"], dataset, BATCH, shuffle=data == "images" or None)
    before: Any = make()
    found = iter(before)
    for _ in range(batches):
        next(found)
    state = before.state_dict()

    def restored() -> object:
        loader: Any = make()
        loader.load_state_dict(copy.deepcopy(state))
        return next(iter(loader))

    return restored


def own_resume(dataset: Any, steps: int) -> Callable[[], object]:
    """With what a checkpoint after so many ``steps`` says of the shards."""
    found: dict[str, Any] = {}
    _, before = lockstep_way(dataset, 0, 8)
    for each in before.epoch(0, padding="none", found=found):
        if each.position.last and each.position.step == steps - 1:
            break

    def resumed() -> object:
        _, loader = lockstep_way(dataset, 0, 8)
        return next(loader.epoch(0, steps, padding="none", found=copy.deepcopy(found)))

    return resumed


def rows_of(place: Path) -> int:
    """Of the parquet files, all together."""
    import pyarrow.parquet as pq

    return sum(int(pq.read_metadata(file).num_rows) for file in place.glob("*.parquet"))


def order_cost(samples: int) -> dict[str, float]:
    """Time to the first indices of an epoch, and the peak of memory that it adds, in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    order = open_order(range(samples), seed=0, shuffle=True)
    assert order is not None
    began = time.perf_counter()
    indices = order.indices(1)
    indices[0:32]
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    for at in range(0, 3200, 32):
        indices[at : at + 32]
    of_batch = (time.perf_counter() - began) / 100
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"samples": samples, "first_s": seconds, "batch_s": of_batch, "mib": peak / 1024}


class Numbers(Dataset[torch.Tensor]):
    """Sixteen numbers a sample, by index."""

    def __len__(self) -> int:
        return STEPS * 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), index % 7 / 7)


class Stream(IterableDataset[torch.Tensor]):
    """The same, one after another, without a word about their number."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = Numbers()
        return (numbers[index] for index in range(len(numbers)))


class Strided(Stream):
    """The same, from which every n-th sample can be read."""

    def stride(self, start: int, step: int) -> Iterator[torch.Tensor]:
        """From ``start`` on."""
        numbers = Numbers()
        return (numbers[index] for index in range(start, len(numbers), step))


class NumberShards:
    """The same in shards."""

    shard_lengths = (100,) * (STEPS * 64 // 100)

    @staticmethod
    def read_shard(shard: int, start: int) -> Iterator[torch.Tensor]:
        """From ``start`` on."""
        numbers = Numbers()
        return (numbers[index] for index in range(shard * 100 + start, shard * 100 + 100))


class UnknownShards:
    """In shards that do not say how many samples they hold."""

    num_shards = len(NumberShards.shard_lengths)
    read_shard = staticmethod(NumberShards.read_shard)


def measure_steps(rounds: int, out: str) -> None:
    """In a rank: steps of a linear model over each kind of data, in turn; the leader writes their medians."""
    kinds: dict[str, Any] = {
        "by index": Numbers(),
        "stream": Stream(),
        "stride": Strided(),
        "shards": NumberShards(),
        "shards, lengths unknown": UnknownShards(),
    }
    with lockstep.Run(seed=0, reduction="fast") as run:
        model = run.model(torch.nn.Linear(16, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        loaders = {name: run.loader(data, global_batch=64, micro_batch=32, workers=0) for name, data in kinds.items()}
        epochs = run.epochs(10**9)
        seen: dict[str, list[list[float]]] = {name: [] for name in kinds}
        for number in range(-1, rounds):
            turn = list(kinds)
            for name in turn[number % len(turn) :] + turn[: number % len(turn)]:
                next(epochs)
                began = time.perf_counter(), time.process_time()
                for batch in run.train(loaders[name]):
                    run.step(F.mse_loss(model(batch), batch[:, :2]))
                ended = time.perf_counter(), time.process_time()
                if number >= 0:
                    seen[name].append([(b - a) / STEPS * 1e3 for a, b in zip(began, ended, strict=True)])
        if run.leads:
            Path(out).write_text(json.dumps(seen))


def steps_over_streams(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds a step, and over those of the data set with an index in the same round."""
    seen = start(__file__, 2, {"rounds": rounds})
    rows = []
    for name, found in seen.items():
        row: dict[str, Any] = {"data": name}
        for place, key in enumerate(("ms", "cpu_ms")):
            own, base = ([times[place] for times in each] for each in (found, seen["by index"]))
            row[key] = median(own)
            row[f"{key}_over"] = sorted(a - b for a, b in zip(own, base, strict=True))
        rows.append(row)
    return rows


# What the command does ------------------------------------------------------------------------------------------------


HEADS = {
    "images": "| {part} | processes | samples/s | from | to | x DataLoader | from | to | CPU us | x DataLoader |",
    "resume": "| resume of | by | ms | from | to |",
    "order": "| samples | ms to the first | us a batch of 32 | MiB |",
    "stream": "| step over | ms | over | from | to | CPU ms | over |",
}


def table(part: str, rows: list[dict[str, Any]]) -> str:
    """For people."""
    head = HEADS.get(part, HEADS["images"]).format(part=part)
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    for row in rows:
        if part == "resume":
            times = (row["seconds"], row["least"], row["most"])
            cells = [row["data"], row["way"], *(f"{seconds * 1e3:.1f}" for seconds in times)]
        elif part == "order":
            cells = [f"{row['samples']:,}", f"{row['first_s'] * 1e3:.1f}", f"{row['batch_s'] * 1e6:.0f}"]
            cells.append(f"{row['mib']:.0f}")
        elif part == "stream":
            over, cpu_over = row["ms_over"], row["cpu_ms_over"]
            cells = [row["data"], f"{row['ms']:.3f}", *(f"{ms:+.3f}" for ms in (median(over), over[0], over[-1]))]
            cells += [f"{row['cpu_ms']:.3f}", f"{median(cpu_over):+.3f}"]
        else:
            ratios = row["ratios"]
            cells = [row["way"], str(row["workers"]), *(f"{row[name]:.0f}" for name in ("rate", "least", "most"))]
            cells += [f"{ratio:.2f}" for ratio in (median(ratios), ratios[0], ratios[-1])]
            cells += [f"{row['cpu_us']:.0f}", f"{row['cpu_ratio']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figures(part: str, place: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What ``part`` measures."""
    if part == "resume":
        return resume(place, options.rounds)
    if part == "order":
        return [start(__file__, 1, {"samples": samples}) for samples in options.samples]
    if part == "stream":
        return steps_over_streams(options.rounds)
    return [row for workers in options.workers for row in throughput(part, place, workers, options.rounds)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8192, help="of the parquet files, all together")
    parser.add_argument("--samples", type=int, nargs="+", default=[10**7, 10**8], help="of the part `order`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not has_stateful:
        print("torchdata is not installed: no StatefulDataLoader", file=sys.stderr)
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        if {"images", "tar", "resume"} & set(options.parts):
            write_images(place, options.images)
        if {"parquet", "resume"} & set(options.parts):
            if has_datasets:
                write_rows(place, options.rows)
            else:
                print("datasets is not installed: nothing of parquet files", file=sys.stderr)
                options.parts = [part for part in options.parts if part != "parquet"]
        for part in options.parts:
            found[part] = figures(part, place, options)
            print(table(part, found[part]), end="\n\n", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2))


def in_a_rank(samples: int = 0, rounds: int = 0, out: str = "") -> None:
    """What `start` asks for."""
    if samples:
        Path(out).write_text(json.dumps(order_cost(samples)))
    else:
        measure_steps(rounds, out)


if __name__ == "__main__":
    if (rank := told()) is not None:
        in_a_rank(**rank)
    else:
        main()
