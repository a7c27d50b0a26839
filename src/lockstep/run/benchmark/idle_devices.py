"""The search for idle CPUs or GPUs while a run trains, and the line that says what would use them.

By default a rank computes on one CPU, so that the bits do not depend on the number of CPUs; and one rank is started
unless more are asked for. So a new user may see only one busy CPU of many.

    1 rank keeps 1.0 of 8 CPUs busy, and 6.9 were idle for 30 s: --nproc-per-node 8 would use them, with the same bits
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from lockstep.cpu_affinity import usable_cpus
from lockstep.cpu_use import CpuUse, CpuWatch
from lockstep.formatting import duration, plural
from lockstep.run.setup.run_context import RunContext, cpus_of_this_rank
from lockstep.trial_contract import current_trial

_WATCH_S: Final = 30.0  # a shorter training is not worth a new start
_BUSY: Final = 0.7  # of its time: a rank that computes less is held up by something else, such as its data
_NEARLY: Final = 0.75  # of a CPU: idle for so long, another rank can have it


@dataclass(frozen=True, slots=True)
class LocalRanks:
    """The ranks of a machine, and its CPUs and GPUs."""

    ranks: int
    threads: int  #: of each rank
    cpus: int  #: that all ranks may use
    gpus: int  #: that all ranks may use; 0: ranks compute on CPUs
    most: int  #: ranks that would have a micro-batch of a step on this machine


def advice(local: LocalRanks, use: CpuUse, seconds: float) -> str | None:
    """The line for the user; None if more ranks would not be quicker.

    Args:
        local: the ranks of this machine.
        use: of its CPUs, by one rank and by all other processes.
        seconds: of the measurement.
    """
    if local.gpus:
        ranks, idle = min(local.gpus, local.most), f"of {local.gpus} GPUs"
        compute = f"{'computes' if local.ranks == 1 else 'compute'} on {local.ranks} {idle}"
    else:
        free = min(use.idle, local.cpus - local.ranks * local.threads)
        ranks = min(local.ranks + int((free + 1 - _NEARLY) / local.threads), local.most)
        if use.own < _BUSY * local.threads:
            return None
        compute = (
            f"{'keeps' if local.ranks == 1 else 'keep'} {local.ranks * use.own:.1f} of {local.cpus} CPUs busy, and "
            f"{use.idle:.1f} were idle for {duration(seconds)}"
        )
    if ranks <= local.ranks:
        return None
    return f"{plural(local.ranks, 'rank')} {compute}: --nproc-per-node {ranks} would use them, with the same bits"


class IdleDevices:
    """Watches the first half minute of training, on one rank of a machine.

    Args:
        local: the ranks of this machine; asked when the time is over.
        say: prints one line for the user.
        now: the clock, in seconds.
    """

    def __init__(
        self, local: Callable[[], LocalRanks], say: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._local: Final = local
        self._say: Final = say
        self._now: Final = now
        self._watch: CpuWatch | None = None
        self._began_s = self._own_s = 0.0
        self._is_over = False

    def look(self) -> None:
        """Look at the use of CPUs, now and then in training; prints the line, if any, when the time is over."""
        if self._is_over:
            return
        if self._watch is None:
            self._watch, self._began_s, self._own_s = CpuWatch(usable_cpus()), self._now(), time.process_time()
        elif (took := self._now() - self._began_s) >= _WATCH_S:
            self._is_over = True
            text = advice(self._local(), self._watch.used(time.process_time() - self._own_s), took)
            if text is not None:
                self._say(text)


def open_idle_devices(context: RunContext) -> IdleDevices | None:
    """A watch for the leader of a run that has the same bits on any number of ranks; None for other ranks and runs."""
    share, group, settings = context.share, context.group, context.settings
    same_bits = settings.reduction == "exact" and share.in_step and share.replicas == group.size
    if not (group.leads and same_bits) or context.measure is not None or current_trial() is not None:
        return None
    ranks = context.world.local_size

    def local() -> LocalRanks:
        plan = context.plan.plan
        return LocalRanks(
            ranks=ranks,
            threads=context.threads,
            cpus=cpus_of_this_rank() * ranks,
            gpus=torch.cuda.device_count() if context.device.type == "cuda" else 0,
            most=ranks if plan is None else plan.micro_batches - (group.size - ranks),
        )

    return IdleDevices(local, context.reporter.say)
