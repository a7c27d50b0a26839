"""Loader processes, which end with their rank, not earlier.

    a scheduler's SIGTERM reaches all processes of a job   the rank finishes its step and saves: workers load on
    the rank closes its loaders, or ends normally          workers are asked to end, waited for, and killed if stuck
    the rank is killed                                     workers notice within a second, also in the user's code

Otherwise a rank that is to stop cleanly would fail on its dead loader, and a killed rank would leave processes behind.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from typing_extensions import override

from lockstep.data.indexed.sampling import Data, Sample, TorchLoader
from lockstep.data.shared_slots import SlotCollate, beginning_workers, forget, forget_all
from lockstep.launch_contract import STOP_SIGNALS
from lockstep.seeding import seed_of
from lockstep.torch_private import forget_iterator, shut_down

_LOOK_EVERY_S = 1.0

_passes: weakref.WeakKeyDictionary[TorchLoader, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
_processes: set[Any] = set()  #: workers of all passes, also of ended ones: a stuck worker may still run


CollateFunction = Callable[[list[Sample]], Data]
"""A function that makes a batch of a list of samples."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The loader processes of a rank."""

    count: int
    init_fn: Callable[[int], object] | None = None  #: called in each process, with its number, before its first sample
    prefetch_factor: int | None = None  #: micro-batches that each process holds ready; None: chosen
    timeout_s: float = 0.0  #: how long a micro-batch may take; 0: no limit


class Loader(DataLoader[Any]):
    """torch's `DataLoader`, with the number of optimizer steps of an epoch as its length, on any number of ranks.

    A loop over the loader gives micro-batches, whose number may differ between ranks. A schedule needs the number of
    steps.

    Args:
        dataset: of the user, or an object that reads the user's data set.
        steps: gives the number of steps of an epoch.
        begins_late: whether a pass begins with its first batch, not with the script's call of ``iter``.
        options: of torch's `DataLoader`.
    """

    def __init__(
        self, dataset: Dataset[object], steps: Callable[[], int], *, begins_late: bool = False, **options: Any
    ) -> None:
        super().__init__(dataset, **options)
        self._steps = steps
        self._begins_late = begins_late

    def __len__(self) -> int:
        return self._steps()

    @override
    def __iter__(self) -> Any:
        return self._batches_from_first() if self._begins_late else self._begin()

    def _batches_from_first(self) -> Iterator[object]:
        yield from self._begin()

    def _begin(self) -> Any:
        _forget_ended()
        with beginning_workers():
            batches = super().__iter__()
        _passes.setdefault(self, weakref.WeakSet()).add(batches)
        _processes.update(getattr(batches, "_workers", ()))
        return batches


def begin_worker(worker_id: int, init_fn: Callable[[int], object] | None = None) -> None:
    """Initialise a loader process, before its first sample; the user's ``init_fn`` is called last."""
    # A scheduler, a launcher or a terminal may send these signals to all processes at once to stop the *ranks*.
    for number in STOP_SIGNALS:
        # A function rather than SIG_IGN, which programs started by the data set would inherit.
        signal.signal(number, _ignore)
    forget_all()
    threading.Thread(target=_end_with_rank, name="end-with-rank", daemon=True).start()
    if init_fn is not None:
        init_fn(worker_id)


def choose_workers(cpus: int, *, in_memory: bool) -> int:
    """The number of loader processes for a rank with ``cpus`` CPUs: at most 8, with one CPU left for the rank.

    0 for data in memory, and for a rank with a single CPU, with which a loader would only take turns.
    """
    return 0 if in_memory else max(0, min(8, cpus - 1))


def choose_prefetch(run: int, workers: int) -> int:
    """The micro-batches that each worker holds ready: for all workers two steps of ``run``, to bridge a step's end."""
    return max(2, -(-2 * run // workers))


def open_loader(
    dataset: Dataset[object], steps: Callable[[], int], workers: WorkerOptions, run: int, seed: int, **options: Any
) -> TorchLoader:
    """A loader of ``dataset`` with ``workers``, for a rank with ``run`` micro-batches a step.

    Its length is the result of ``steps``, called each time. Unlike torch's, its passes do not move the global
    generators of this process.
    """
    if workers.count:
        ready = workers.prefetch_factor or choose_prefetch(run, workers.count)
        options |= {
            "collate_fn": SlotCollate(options["collate_fn"] or default_collate, ready),
            "prefetch_factor": ready,
            "worker_init_fn": partial(begin_worker, init_fn=workers.init_fn),
            "timeout": workers.timeout_s,
        }
    generator = torch.Generator().manual_seed(seed_of(seed, "loader"))
    return Loader(dataset, steps, num_workers=workers.count, generator=generator, **options)


def as_it_is(data: Data) -> Data:
    """``data`` itself, as the collate function of a loader whose data set gives whole batches."""
    return data


def end_passes(loader: TorchLoader) -> None:
    """End the processes of all passes over ``loader``, which may be iterated again."""
    # Torch keeps the iterator while its workers persist. The only public way to end workers is to delete the loader,
    # which may be the user's.
    passes = tuple(_passes.pop(loader, ()))
    forget_iterator(loader)
    for batches in passes:
        _end(batches)
    _forget_ended()


def _forget_ended() -> None:
    for worker in [worker for worker in _processes if not worker.is_alive()]:
        _processes.discard(worker)
        forget(worker.pid)


def _end(batches: object) -> None:
    workers = getattr(batches, "_workers", ())
    if workers:
        shut_down(batches)  # waits 5 s for each
    for worker in workers:
        if worker.is_alive():
            worker.kill()
        worker.join()
        forget(worker.pid)


@atexit.register
def _end_all() -> None:
    # At exit, multiprocessing ends children by SIGTERM, which loader processes ignore, and then waits for them without
    # end. Its exit handler was registered when torch was imported, so this one runs first.
    for loader in tuple(_passes):
        end_passes(loader)
    for worker in _processes:
        worker.kill()


def _ignore(number: int, frame: object) -> None:
    """Ignore the signal, which the rank gets, too: the rank ends its workers itself."""


def _end_with_rank() -> None:
    rank = multiprocessing.parent_process()
    assert rank is not None
    # The parent is the rank, unless the rank is gone already or a fork server stands between. Then only the rank's end
    # of a pipe tells, which other processes of the rank may have inherited, and hold open.
    is_parent = os.getppid() == rank.pid
    while not wait([rank.sentinel], _LOOK_EVERY_S):
        if is_parent and os.getppid() != rank.pid:
            break
    os._exit(0)
