"""Whether CPUs or GPUs lie idle while a run trains, and the one line that says what would use them.

A rank computes on one CPU unless it is told otherwise, so that the bits do not depend on how many CPUs there are; and
one rank is started unless more are asked for. So a new user may see only one busy CPU of many.

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
    """The ranks of one machine, and what there is for them."""

    ranks: int
    threads: int  #: of each
    cpus: int  #: that all of them may use
    gpus: int  #: that all of them may use; 0: they compute on CPUs
    most: int  #: ranks that would have something to do here: each has a micro-batch of a step


def advice(local: LocalRanks, use: CpuUse, seconds: float) -> str | None:
    """The line for the user; None where more ranks would not be quicker.

    Args:
        local: the ranks of this machine.
        use: of its CPUs, by one of them and by everything else.
        seconds: in which that was measured.
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
        """While training, now and then: the line is said when the time is over, if there is something to say."""
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
    """For the leader of a run that trains the same bits on any number of ranks; None for all others."""
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
