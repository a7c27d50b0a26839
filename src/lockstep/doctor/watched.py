"""Runs a script without `Run` as one of two ranks, and watches it; it ends by itself after some passes over its data.

    lockstep run -m lockstep.doctor.watched [-m] script.py [its options]

    first pass   steps timed | then calls that wait, and collectives, are counted ...   20 batches
    later passes                                                                         3 batches each
    torch.save   writes to a directory of its own, which is removed

The script is watched by hooks that torch has for all optimizers and modules, and by what its loaders hand out. Every
rank counts alike, so that all of them end together.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from lockstep.doctor.script_facts import PassFacts, SaveFacts, ScriptFacts
from lockstep.heartbeat import find_user_frame
from lockstep.launch_contract import RUN_DIR
from lockstep.memory_use import host_memory
from lockstep.run import HostWaits, free_bytes
from lockstep.world import World

_FIRST, _LATER = 20, 3  # batches of a pass
_TIMED = 6  # steps, of which the first is warm-up
_MOST_STEPS, _MOST_PASSES = 60, 3  # of training


@dataclass(slots=True)
class OpenPass:
    """A pass, and what happens from each batch that it gives until another pass gives one."""

    facts: PassFacts
    loader: DataLoader[Any] | None
    steps: int = 0
    reductions: int = 0
    forwards: set[bool] = field(default_factory=set)  #: whether with gradients

    def ended(self) -> PassFacts:
        """What is known of it now."""
        evaluates = self.forwards == {False} and not self.steps
        return replace(self.facts, evaluates=evaluates, steps=self.steps, reductions=self.reductions)


class ReductionCounter(TorchDispatchMode):
    """Calls ``count`` for each collective by which values of ranks come together, as torch dispatches them."""

    def __init__(self, count: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count: Final = count

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        name = str(func)
        if name.startswith("c10d") and ("reduce" in name or "gather" in name):
            self._count()
        return func(*args, **(kwargs or {}))


class Watch:
    """What is seen of the script on this rank."""

    def __init__(self, world: World, directory: Path) -> None:
        self._world: Final = world
        self._directory: Final = directory
        self._on_gpu: Final = torch.cuda.is_available()
        self._waits: Final = HostWaits(
            on_gpu=self._on_gpu, trains=lambda: True in self._now.forwards and not self._reads
        )
        self._watching: contextlib.ExitStack | None = None
        self._ends: list[tuple[float, float]] = []  # of steps: when, and how long loaders were waited for until then
        self._data_s = 0.0
        self._steps = self._watched_from = 0
        self._reads = False
        self._unused: tuple[str, ...] | None = None
        self._wrappers: list[nn.parallel.DistributedDataParallel] = []
        self._now: OpenPass = OpenPass(PassFacts("", 0, evaluates=False), None)  # which has given the last batch
        self._passes: list[OpenPass] = []
        self._saves: dict[str, SaveFacts] = {}

    def begin(self) -> None:
        """Watch from now on."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        register_module_forward_pre_hook(lambda module, args: self._now.forwards.add(torch.is_grad_enabled()))
        iterate, save, load, watch = DataLoader.__iter__, torch.save, torch.load, self

        def iterate_less(loader: DataLoader[object]) -> Iterator[object]:
            return watch._pass_over(loader, iterate(loader))

        def save_elsewhere(obj: Any, f: Any, *args: Any, **options: Any) -> None:
            save(obj, watch._noted(f) if isinstance(f, str | os.PathLike) else f, *args, **options)

        def load_from_there(f: Any, *args: Any, **options: Any) -> object:
            there = isinstance(f, str | os.PathLike) and os.fspath(f) in watch._saves
            return load(watch._elsewhere(f) if there else f, *args, **options)

        DataLoader.__iter__ = iterate_less  # type: ignore[method-assign, assignment]
        torch.save, torch.load = save_elsewhere, load_from_there

    def end(self) -> None:
        """The script is over: what was seen is written."""
        if self._watching is not None:
            self._watching.close()
        self._write()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, options: object) -> None:
        if self._unused is not None:
            return
        learning = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        modules = [found for found in gc.get_objects() if isinstance(found, nn.Module)]
        inside = {id(child) for module in modules for child in module.children()}
        roots = [module for module in modules if id(module) not in inside]
        self._unused = tuple(
            name.removeprefix("module.")
            for root in roots
            for name, parameter in root.named_parameters()
            if id(parameter) in learning and parameter.grad is None
        )
        self._wrappers = [module for module in modules if isinstance(module, nn.parallel.DistributedDataParallel)]
        self._write()  # it may fail in the next step

    def _after_step(self, optimizer: torch.optim.Optimizer, args: object, options: object) -> None:
        self._steps += 1
        self._now.steps += 1
        if self._steps <= _TIMED:
            self._ends.append((time.perf_counter(), self._data_s))
        elif self._watching is None:
            self._watching, self._watched_from = contextlib.ExitStack(), self._steps
            self._watching.enter_context(self._waits)
            self._watching.enter_context(ReductionCounter(self._count))
        if self._steps >= _MOST_STEPS:
            raise SystemExit(0)

    def _count(self) -> None:
        self._now.reductions += 1

    def _pass_over(self, loader: DataLoader[object], batches: Iterator[object]) -> Iterator[object]:
        """What ``loader`` would give, but for most of it."""
        if sum(bool(each.steps) for each in self._passes) >= _MOST_PASSES:
            raise SystemExit(0)
        most = _LATER if any(each.loader is loader for each in self._passes) else _FIRST
        opened = OpenPass(self._new_pass(loader), loader)
        self._passes.append(opened)
        for _ in range(most):
            began, self._reads = time.perf_counter(), True
            try:
                batch = next(batches)
            except StopIteration:
                break
            finally:
                self._data_s += time.perf_counter() - began
                self._reads = False
            self._now = opened
            yield batch

    def _new_pass(self, loader: DataLoader[object]) -> PassFacts:
        streams = isinstance(loader.dataset, IterableDataset)
        sampler = None if streams else getattr(loader.batch_sampler, "sampler", loader.sampler)
        divided = isinstance(sampler, DistributedSampler)
        place, _, _ = find_user_frame(sys._getframe(2))
        return PassFacts(
            file=place.file,
            line=place.line,
            evaluates=False,
            length=None if streams or not hasattr(loader.dataset, "__len__") else len(loader.dataset),
            batch_size=loader.batch_size,
            drop_last=sampler.drop_last if isinstance(sampler, DistributedSampler) else loader.drop_last,
            divided=sampler.num_replicas if isinstance(sampler, DistributedSampler) else 0,
            part=_digest(loader.dataset.indices) if isinstance(loader.dataset, Subset) else "",
            own_order=not divided and not isinstance(sampler, RandomSampler | SequentialSampler),
            shuffles=sampler.shuffle if isinstance(sampler, DistributedSampler) else False,
            epoch=sampler.epoch if isinstance(sampler, DistributedSampler) else 0,
            watched=self._watching is not None,
        )

    def _noted(self, path: str | os.PathLike[str]) -> Path:
        place, _, _ = find_user_frame(sys._getframe(2))
        self._saves.setdefault(os.fspath(path), SaveFacts(os.path.abspath(path), place.file, place.line))
        return self._elsewhere(path)

    def _elsewhere(self, path: str | os.PathLike[str]) -> Path:
        return self._directory / f"saved-{self._world.rank}-{list(self._saves).index(os.fspath(path))}"

    def _write(self) -> None:
        took = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(self._ends, self._ends[1:], strict=False)]
        device = torch.device("cuda", torch.cuda.current_device()) if self._on_gpu else torch.device("cpu")
        training = next((each.loader for each in self._passes if each.steps), None)
        reduces = any(each.reductions for each in (self._now, *self._passes))
        ScriptFacts(
            rank=self._world.rank,
            ranks=self._world.size,
            uses_run=False,
            on_gpu=self._on_gpu,
            step_s=statistics.median(step_s for step_s, _ in took) if took else 0.0,
            data_s=statistics.median(data_s for _, data_s in took) if took else 0.0,
            samples=self._world.size * ((training.batch_size if training else 0) or 0),
            workers=training.num_workers if training else 0,
            peak_bytes=torch.cuda.max_memory_allocated() if self._on_gpu else host_memory().host_peak or 0,
            free_bytes=free_bytes(device, self._world.local_size),
            unused=self._unused or (),
            waits=self._waits.found(max(1, self._steps - self._watched_from)),
            joined=bool(self._wrappers) or reduces,
            waits_for_all=any(not (each.find_unused_parameters or each.static_graph) for each in self._wrappers),
            passes=tuple(each.ended() for each in self._passes),
            saves=tuple(self._saves.values()),
        ).write(self._directory)


def _digest(indices: Sequence[int]) -> str:
    return hashlib.sha256(repr([int(index) for index in indices]).encode()).hexdigest()[:12]


def main() -> None:
    """Run the script of the command line."""
    is_module = sys.argv[1] == "-m"
    name = sys.argv[1 + is_module]
    sys.argv = sys.argv[1 + is_module :]
    watch = Watch(World.from_env(os.environ), Path(os.environ[RUN_DIR]))
    watch.begin()
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(name).absolute().parent)
            runpy.run_path(name, run_name="__main__")
    finally:
        watch.end()


if __name__ == "__main__":
    main()
