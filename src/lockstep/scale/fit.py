"""The largest micro-batch that fits: ``lockstep run --fit`` finds it by short runs of the script, with all its ranks.

    global_batch 96 on 2 ranks      divisors up to 48:  1 2 3 4 6 8 12 16 24 32 48
                                    a run of a few steps with   6     16     24   32
                                                               fits  fits  fits  out of memory      micro_batch=24

A rank whose memory runs out ends such a run for all of them, so they agree. The micro-batch divides the global batch,
so the steps of the script stay what they are, and its bits are those of ``--set micro_batch=24`` on any number of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lockstep.errors import SettingError
from lockstep.formatting import plural, size
from lockstep.launch import Module, Script, check_program
from lockstep.memory_use import host_memory
from lockstep.scale.measured_run import FailedRun, MeasuredRun, Records, measure

_STEPS: Final = 3
#: The part of the host's free memory that a run may be expected to take: when all is taken, the kernel kills processes.
_USABLE: Final = 0.85


@dataclass(frozen=True, slots=True)
class Peak:
    """What a run took with one micro-batch, in bytes."""

    micro_batch: int
    busiest: int  #: the peak of the rank that took most
    all_ranks: int  #: the sum of their peaks


def divisors(number: int, most: int) -> list[int]:
    """The divisors of ``number`` up to ``most``, in order."""
    return [one for one in range(1, most + 1) if number % one == 0]


def largest(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of ``sizes``, in order, that fits; None: not even the first. Asks about log2 of them.

    All that are smaller than one that fits must fit.
    """
    low, high = -1, len(sizes)  # fits, does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes[middle]) else (low, middle)
    return sizes[low] if low >= 0 else None


def expected(peaks: Sequence[Peak], micro_batch: int) -> int:
    """The bytes that all ranks are expected to take together, from a line through the two nearest that were measured.

    With one that was measured: in proportion to the micro-batch, which is too much.
    """
    known = sorted(peaks, key=lambda peak: abs(peak.micro_batch - micro_batch))[:2]
    if not known:
        return 0
    if len(known) == 1:
        return known[0].all_ranks * micro_batch // known[0].micro_batch
    near, far = known
    slope = (near.all_ranks - far.all_ranks) / (near.micro_batch - far.micro_batch)
    return int(near.all_ranks + max(0.0, slope) * (micro_batch - near.micro_batch))


def fit_micro_batch(
    program: Script | Module, ranks: int, settings: Mapping[str, str], say: Callable[[str], None]
) -> int:
    """The largest micro-batch with which ``ranks`` ranks of this machine train ``program``.

    Takes about log2 of the number of candidates, times a start of the script and a few steps.

    Args:
        program: is started several times; what it prints goes nowhere, and it leaves nothing behind.
        ranks: of each of these runs.
        settings: given from outside, over those of the script.
        say: is told what goes on, in lines.

    Raises:
        SettingError: if the script does not run, or no micro-batch fits.
    """
    check_program(program)
    peaks: list[Peak] = []

    def attempt(given: Mapping[str, str]) -> Records | FailedRun:
        outcome = measure(MeasuredRun(program, ranks, {**settings, **given}, _STEPS))
        if isinstance(outcome, FailedRun):
            if not outcome.out_of_memory:
                raise SettingError(f"--fit: {program.name} could not be tried: {outcome.cause}")
            return outcome
        taken = [record.peak_bytes for record in outcome.ranks]
        peak = Peak(outcome.ranks[0].micro_batch, max(taken), sum(taken))
        peaks.append(peak)
        say(f"fit: micro_batch {peak.micro_batch} fits: at most {size(peak.busiest)} on a rank")
        return outcome

    first = attempt({})
    if isinstance(first, FailedRun):
        say("fit: the script's own micro_batch does not fit")
        first = attempt({"micro_batch": "1"})
    if isinstance(first, FailedRun):
        raise SettingError(
            f"--fit: not even micro_batch=1 fits on {plural(ranks, 'rank')} ({first.cause}); divide the model by "
            "--strategy fsdp, use more ranks, or --precision bf16"
        )
    record = first.ranks[0]
    candidates = divisors(record.global_batch, max(1, record.global_batch // ranks))
    free = (host_memory().host_free or 0) if not record.on_gpu else 0

    def fits(micro_batch: int) -> bool:
        if any(peak.micro_batch >= micro_batch for peak in peaks):
            return True
        if free and (wanted := expected(peaks, micro_batch)) > _USABLE * free:
            say(
                f"fit: micro_batch {micro_batch} would not fit, by estimate: {size(wanted)} on "
                f"{plural(ranks, 'rank')}, and {size(free)} are free"
            )
            return False
        outcome = attempt({"micro_batch": str(micro_batch)})
        if isinstance(outcome, FailedRun):
            say(f"fit: micro_batch {micro_batch} does not fit: {outcome.cause}")
        return not isinstance(outcome, FailedRun)

    found = largest(candidates, fits) or record.micro_batch
    say(
        f"fit: micro_batch={found} of global_batch={record.global_batch} on {plural(ranks, 'rank')}; the bits are "
        f"those of --set micro_batch={found} on any number of ranks"
    )
    return found
