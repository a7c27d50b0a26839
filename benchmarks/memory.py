"""How much memory a rank needs while it starts, steps, saves and resumes: strategies, and torch by hand.

python benchmarks/memory.py --page docs/strategies/measured.md
python benchmarks/memory.py --ways fsdp by-hand --ranks 2 --micro 1 --millions 100 --json memory.json

A multilayer perceptron of eight square layers learns under AdamW. Each line is two jobs: one starts, trains and saves,
and another one resumes. Most of the memory are four numbers for each parameter, and strategies differ in how much of
each lies on every rank:

             parameter  gradient  two moments    bytes a parameter, W ranks
    ddp          4          4          8         16
    zero         4          4         8/W        8 + 8/W
    fsdp        4/W        4/W        8/W        16/W

With autocast to bf16 or fp16 they stay fp32, so the formulas are the same; then half a copy of the weights comes and
goes with each forward pass.

By hand, a model is made on the device meta, divided by `fully_shard`, initialised by its own `reset_parameters`, and
saved and loaded by `torch.distributed.checkpoint`: ``by-hand`` waits for its save, as `dcp.save` does, and
``by-hand-async`` goes on meanwhile, as `dcp.async_save` does and the strategies do.
"""

import argparse
import gc
import importlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
import pages
from lockstep.strategy_kinds import BUILT_IN
from ranks import memory_bytes, return_freed_memory, start, told

BATCH = 8  # samples of a micro-batch: few, so that activations are small beside the model
LAYERS, STEPS = 8, 3
FIGURES = ("formula", "held", "start", "step", "save", "kept", "resume", "shared")
TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Bytes a parameter from the number of ranks.
FORMULAS: dict[str, Callable[[int], float]] = {
    "ddp": lambda ranks: 16,
    "zero": lambda ranks: 8 + 8 / ranks,
    "fsdp": lambda ranks: 16 / ranks,
    "hsdp": lambda ranks: 16 / ranks,
    "by-hand": lambda ranks: 16 / ranks,
    "by-hand-async": lambda ranks: 16 / ranks,
}


def build(millions: float) -> nn.Sequential:
    """Square layers of about so many million parameters."""
    width = max(1, round((millions * 1e6 / LAYERS) ** 0.5))
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())))


def samples(width: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, whose values lie in the memory of a few, and labels."""
    return torch.randn(number + width).unfold(0, width, 1)[:number], torch.arange(number) % width


# What a rank does -----------------------------------------------------------------------------------------------------


class Memory:
    """The memory of this process, or of its GPU, phase by phase, above what it had before the first one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: dict[str, int] = {}
        self._held = 0  # the most in tensors, at an optimizer's step
        self._before = 0
        self._before = self.now()
        self._begin()

    def now(self) -> int:
        """What is used at this moment."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated() - self._before
        # The ranks of one machine sum through memory that they share: it is there once, though each of them shows it.
        return memory_bytes("VmRSS") - memory_bytes("RssShmem") - self._before

    def end(self, phase: str) -> None:
        """Note the peak of ``phase``, and after a step what tensors held; the next one begins."""
        if phase == "step":
            self.bytes["held"] = self._held
        if self._device.type == "cuda":
            self.bytes[phase] = torch.cuda.max_memory_allocated() - self._before
        else:
            self.bytes[phase] = memory_bytes("VmHWM") - memory_bytes("RssShmem") - self._before
        self._begin()

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """At each step of ``optimizer``, look at what tensors hold."""
        optimizer.register_step_post_hook(lambda *_: self._look())

    def _look(self) -> None:
        self._held = max(self._held, live_bytes(self._device))

    def _begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")


def live_bytes(device: torch.device) -> int:
    """Memory of all tensors that Python knows of, each storage once."""
    storages = {}
    for value in gc.get_objects():
        if isinstance(value, torch.Tensor) and value.device.type == device.type:
            for tensor in (value, value.grad if value.is_leaf else None):
                tensor = getattr(tensor, "_local_tensor", tensor)  # noqa: PLW2901 - of a DTensor
                if type(tensor) in (torch.Tensor, nn.Parameter):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def load_libraries(way: str) -> None:
    """Load what is loaded late, since it is not the strategy's."""
    torch.optim.AdamW(build(0).parameters())
    if way in BUILT_IN:
        importlib.import_module(BUILT_IN[way].module)
    return_freed_memory()


def measure(out: str, **job: Any) -> None:
    """One job; the leader writes what the rank with most of it held, and needed at most, a parameter."""
    load_libraries(job["way"])
    every, parameters = (with_run if job["way"] in BUILT_IN else by_hand)(**job)
    if every:
        found = {what: max(one[what] for one in every) / parameters for what in every[0]}
        Path(out).write_text(json.dumps(found))


def with_run(
    way: str, millions: float, precision: str, micro: int, place: str, resume: bool
) -> tuple[list[dict[str, int]], int]:
    """A lockstep run. What each rank has needed, on the leader; and how many parameters there are."""
    os.environ["LOCKSTEP_RESUME"] = str(int(resume))
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = f"hsdp:shard={ranks}" if way == "hsdp" else way
    memory = Memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with lockstep.Run(strategy=strategy, precision=precision, checkpoint=place, save_every="1 epoch") as run:
        model = run.model(lambda: build(millions))
        width, parameters = model[0].in_features, sum(p.numel() for p in model.parameters())
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
        memory.watch(optimizer)
        memory.end("start")
        batches = run.loader(
            TensorDataset(*samples(width, BATCH * ranks * micro * STEPS)),
            global_batch=BATCH * ranks * micro,
            micro_batch=BATCH,
            workers=0,
        )
        before_save = 0
        for epoch in run.epochs(3 if resume else 2):
            if resume:
                memory.end("resume")
            for step, (inputs, labels) in enumerate(run.train(batches)):
                run.step(F.cross_entropy, inputs, labels)
                # What is saved at the end of the first epoch is written while the second one trains.
                if epoch == 1 and step == 0 and not resume:
                    wait_for_save(place)
            memory.end("step" if epoch == 0 else "save")
            if epoch == 0:
                before_save = memory.now()
            else:  # the next save has not begun yet
                memory.bytes["kept"] = memory.now() - before_save
        shared = 0 if torch.cuda.is_available() else memory_bytes("RssShmem")
        every = run.gather(memory.bytes | {"shared": shared})
        return every if run.leads else [], parameters


def wait_for_save(place: str) -> None:
    """Until the first save has ended, which the other ranks hear of a little later."""
    while not any(Path(place).glob("step-*")):
        time.sleep(0.01)
    time.sleep(0.2)


def by_hand(
    way: str, millions: float, precision: str, micro: int, place: str, resume: bool
) -> tuple[list[dict[str, int]], int]:
    """As `with_run`, by torch alone."""
    warnings.simplefilter("ignore")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cuda:nccl,cpu:gloo" if kind == "cuda" else "gloo")
    saving = dist.new_group(backend="gloo")  # of the thread that saves
    memory = Memory(torch.device(kind))
    with torch.device("meta"):
        model = build(millions)
    width, parameters = model[0].in_features, sum(p.numel() for p in model.parameters())
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=kind)
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    memory.watch(optimizer)
    memory.end("start")
    inputs, labels = samples(width, BATCH * micro)
    autocast = torch.autocast(kind, TYPES[precision]) if TYPES[precision] else nullcontext()

    def train() -> Iterator[int]:
        for step in range(STEPS):
            for some, their in zip(inputs.split(BATCH), labels.split(BATCH), strict=True):
                with autocast:
                    loss = F.cross_entropy(model(some.to(kind)), their.to(kind)) / micro
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield step

    def state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    if resume:
        loaded = state()
        dcp.load(loaded, checkpoint_id=place)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        del loaded
        memory.end("resume")
    for _ in train():
        pass
    memory.end("step")
    if not resume:
        before_save = memory.now()
        if way == "by-hand":
            dcp.save(state(), checkpoint_id=place)
        else:
            written = dcp.async_save(state(), checkpoint_id=place, process_group=saving)
        for step in train():
            if step == 0 and way == "by-hand-async":
                written.result()
        memory.end("save")
        memory.bytes["kept"] = memory.now() - before_save
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, memory.bytes | {"shared": 0}, group=saving)
    dist.destroy_process_group()
    return every if int(os.environ["RANK"]) == 0 else [], parameters


# What the command does ------------------------------------------------------------------------------------------------


def line(way: str, ranks: int, **job: Any) -> dict[str, float]:
    """Bytes a parameter of each phase, of what was held, and of what is shared."""
    with tempfile.TemporaryDirectory() as place:
        described = {"way": way, "place": str(Path(place, "checkpoints")), **job}
        begun = start(__file__, ranks, described | {"resume": False})
        return begun | {"resume": start(__file__, ranks, described | {"resume": True})["resume"]}


def table(rows: list[dict[str, Any]]) -> str:
    """As markdown."""
    names = {way: f"`{way}`" for way in BUILT_IN}
    names |= {"by-hand": "by hand, `dcp.save`", "by-hand-async": "by hand, `dcp.async_save`"}
    cells = [
        [names[row["way"]], row["precision"], str(row["ranks"]), str(row["micro"])]
        + [f"{row[figure]:.1f}" for figure in FIGURES]
        for row in rows
    ]
    return pages.markdown(["", "precision", "ranks", "micro-batches", *FIGURES], cells)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=list(FORMULAS), choices=FORMULAS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[3])
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 4], help="micro-batches of a rank in a step")
    parser.add_argument("--millions", type=float, default=30, help="parameters of the model")
    parser.add_argument("--precisions", nargs="+", default=["fp32"], choices=TYPES)
    parser.add_argument("--rounds", type=int, default=1, help="the least of so many jobs counts")
    parser.add_argument("--page", metavar="FILE", help="put the table into this page of the documentation")
    parser.add_argument("--place", default="memory", help="where in that page: the name of the table there")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    print(f"{'way':<14}{'precision':<10}{'ranks':>5}{'micro':>6}" + "".join(f"{name:>9}" for name in FIGURES))
    rows: list[dict[str, Any]] = []
    for precision in options.precisions:
        for ranks in options.ranks:
            for way in options.ways:
                for micro in options.micro:
                    job = {"millions": options.millions, "precision": precision, "micro": micro}
                    runs = [line(way, ranks, **job) for _ in range(options.rounds)]
                    found = {what: min(run[what] for run in runs) for what in runs[0]}
                    row = {"way": way, "precision": precision, "ranks": ranks, "micro": micro}
                    rows.append(row | {"formula": FORMULAS[way](ranks)} | found)
                    print(
                        f"{way:<14}{precision:<10}{ranks:>5}{micro:>6}"
                        + "".join(f"{rows[-1][name]:>9.1f}" for name in FIGURES),
                        flush=True,
                    )
    if options.page:
        made = f"{pages.circumstances()}, {options.millions:g} million parameters, bytes a parameter:"
        pages.put(options.page, options.place, f"{made}\n\n{table(rows)}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    if (rank := told()) is not None:
        measure(**rank)
    else:
        main()
