"""What a minute of training on two ranks says of a script: pure functions from facts to findings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.doctor.finding import Finding, note, ok, problem
from lockstep.doctor.host_findings import brief
from lockstep.doctor.script_facts import PassFacts, ScriptFacts, SourceFault
from lockstep.formatting import count, format_ranks, grouped, plural, relative_path, size
from lockstep.scale import divisors

_WAITS, _LEAST_S, _FASTER = 0.1, 1e-3, 0.95  # of a step, in which it waits for data; what a change must bring
_OFTEN: Final = 0.5  # calls in a step: a line that is there for each one, not for every tenth
_COST: Final = 0.01  # of a step
_USABLE: Final = 0.85  # of the free memory
_MOST_NAMES: Final = 6  # of parameters, or lines


@dataclass(frozen=True, slots=True)
class Tried:
    """The same script with more loader processes."""

    step_s: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ScriptSeen:
    """All that is known of a script."""

    ranks: Sequence[ScriptFacts]  #: at least one
    faults: Sequence[SourceFault] = ()  #: in its source
    cpus: int = 1  #: of each rank
    tried: Tried | None = None  #: None: nobody has tried more workers


def judge_script(seen: ScriptSeen) -> tuple[Finding, ...]:
    """All findings about a script."""
    by_run = seen.ranks[0].uses_run
    rules = (_gradients, _waits, _memory, _batches) if by_run else (_gradients, _waits, *_BY_HAND)
    found = [*_loader(seen), *(finding for rule in rules for finding in rule(seen.ranks))]
    why = "DistributedDataParallel takes the mean of the gradients already: the step is too small by their number"
    for fault in seen.faults:
        what = f"{_at(fault.file, fault.line)}: {fault.what}"
        found.append(problem("mean", what=what, why=why, command="leave the division, or the sum, out"))
    return tuple(found)


def _gradients(facts: Sequence[ScriptFacts]) -> Iterator[Finding]:
    if not facts[0].step_s and not facts[0].unused:
        return
    everywhere = set.intersection(*(set(each.unused) for each in facts))
    somewhere = set.union(*(set(each.unused) for each in facts)) - everywhere
    for names, where in ((everywhere, "no gradient"), (somewhere, "no gradient on some ranks")):
        if names:
            listed = [name for each in facts for name in each.unused if name in names]
            shown = ", ".join(dict.fromkeys(listed[:_MOST_NAMES])) + ", ..." * (len(names) > _MOST_NAMES)
            by_hand = facts[0].waits_for_all
            yield Finding(
                "gradients",
                "problem" if by_hand else "note",
                f"{plural(len(names), 'parameter')} got {where}: {shown}",
                "DistributedDataParallel waits for each gradient, and fails in the next step"
                if by_hand
                else "no loss depends on them: a layer that forward leaves out, or one too many",
                "requires_grad_(False) for them, or find_unused_parameters=True" if by_hand else "leave them out",
            )
    if not everywhere | somewhere:
        yield ok("gradients", what="each parameter that learns got one")


def _loader(seen: ScriptSeen) -> Iterator[Finding]:
    slowest = slowest_reader(seen.ranks)
    if slowest is None:
        if seen.ranks[0].step_s:
            yield ok("loader", what="no step waits for it long")
        return
    now, wanted = plural(slowest.workers, "worker"), workers_wanted(slowest)
    what = f"a rank waits {brief(slowest.data_s)} of a step of {brief(slowest.step_s)} for it, with {now}"
    if seen.tried is None:
        more = f"{plural(wanted, 'worker')} would do"
    elif seen.tried.failure:
        more = f"with {plural(wanted, 'worker')} it failed: {seen.tried.failure}"
    else:
        more = f"{plural(wanted, 'worker')} were tried: {brief(seen.tried.step_s)} a step"
        if seen.tried.step_s > _FASTER * slowest.step_s:
            few = f", of which a rank has {plural(seen.cpus, 'CPU')} here" if wanted >= seen.cpus else ""
            yield ok("loader", what=f"{what}; {more}, which gains nothing{few}")
            return
    yield note(
        "loader",
        what=f"{what}; {more}",
        why="the device is idle meanwhile",
        command=f"--set workers={wanted}" if slowest.uses_run else f"DataLoader(..., num_workers={wanted})",
    )


def slowest_reader(ranks: Sequence[ScriptFacts]) -> ScriptFacts | None:
    """The rank that waits longest for its data; None if that is not worth a change."""
    slowest = max(ranks, key=lambda each: each.data_s)
    return slowest if slowest.data_s > max(_LEAST_S, _WAITS * slowest.step_s) else None


def workers_wanted(facts: ScriptFacts) -> int:
    """Loader processes with which a step would not wait, if each reads as fast as what was seen."""
    # Without workers the rank reads by itself; with some, all of them are busy for as long as a step takes.
    reading_s = facts.data_s if not facts.workers else facts.step_s * facts.workers
    return max(facts.workers + 1, math.ceil(reading_s / max(1e-6, facts.step_s - facts.data_s)))


def _waits(facts: Sequence[ScriptFacts]) -> Iterator[Finding]:
    first = facts[0]
    step_s = first.step_s or math.inf
    often = [wait for wait in first.waits if wait.count > _OFTEN or wait.seconds > _COST * step_s]
    meanwhile = "the host waits for all that is queued on the GPU, and queues nothing meanwhile"
    why = meanwhile if first.on_gpu else f"it costs little on a CPU; on a GPU {meanwhile}"
    rarely = "read it every 50 steps"
    command = f"run.measure(...), or {rarely}" if first.uses_run else f".detach(), and {rarely}"
    for wait in often[:_MOST_NAMES]:
        cost = f"{brief(wait.seconds)} a step ({100 * wait.seconds / step_s:.1f} %)"
        what = f"{_at(wait.file, wait.line)}: {wait.calls}, {count(wait.count)} times a step, {cost}"
        yield note("host waits", what=what, why=why, command=command)
    if len(often) > _MOST_NAMES:
        what = f"{plural(len(often) - _MOST_NAMES, 'more line')} that cost less"
        yield note("host waits", what=what, why=why, command=command)
    if not often and first.step_s:
        yield ok("host waits", what="no line of the loop needs a tensor's value in each step")


def _memory(facts: Sequence[ScriptFacts]) -> Iterator[Finding]:
    most = max(facts, key=lambda each: each.peak_bytes)
    what = f"{size(most.peak_bytes)} at most on a rank, {size(most.free_bytes)} free for it"
    samples = min(most.micro_batch, most.global_batch)
    if most.activation_bytes and samples and most.free_bytes:
        per_sample = most.activation_bytes / samples
        fits = int(samples + _USABLE * most.free_bytes / per_sample)
        largest = divisors(most.global_batch, max(1, min(fits, most.global_batch // most.ranks)))[-1]
        what += f"; {size(per_sample)} of activations a sample: micro_batch={largest} fits, of global_batch="
        what += f"{most.global_batch} on {plural(most.ranks, 'rank')}"
    if most.free_bytes and most.free_bytes < 0.1 * most.peak_bytes:
        yield note(
            "memory", what=what, why="a longer sample, or a second job, and it is full", command="lockstep run --fit"
        )
    else:
        yield ok("memory", what=f"{what} (lockstep run --fit tries it)" if samples else what)


def _batches(facts: Sequence[ScriptFacts]) -> Iterator[Finding]:
    whole, micro, ranks = facts[0].global_batch, facts[0].micro_batch, facts[0].ranks
    if not whole:
        return
    parts = -(-whole // micro)
    found = False
    if whole % micro:
        found, fitting = True, divisors(whole, micro)[-1]
        what = f"global_batch={whole} is {parts - 1} micro-batches of {micro} and one of {whole % micro}"
        why = "a forward and backward pass for a small rest, at about the price of a whole one"
        yield note("batches", what=what, why=why, command=f"--set micro_batch={fitting}")
    if parts % ranks:
        found, most = True, -(-parts // ranks)
        what = f"of {plural(parts, 'micro-batch')} one rank of {ranks} computes {most}, and another fewer"
        fitting = next((d for d in reversed(divisors(whole, micro)) if whole // d % ranks == 0), 0)
        why = f"{100 * (1 - parts / (most * ranks)):.0f} % of the ranks' time is lost"
        yield note("batches", what=what, why=why, command=f"--set micro_batch={fitting}" if fitting else "other ranks")
    if not found:
        last = (facts[0].samples_per_epoch or 0) % whole
        rest = f"; an epoch's last step has {last} samples" if last else ""
        yield ok("batches", what=f"{whole} = {parts} micro-batches of {micro}{rest}")


# ---- of scripts without Run ----------------------------------------------------------------------------------------


def _world(facts: Sequence[ScriptFacts]) -> Iterator[Finding]:
    if not any(each.joined for each in facts) and facts[0].step_s:
        yield note(
            "ranks",
            what="the ranks exchange nothing: each trains a model of its own",
            why="a script for one rank; docs/from-single-gpu.md says what to change for several",
            command="lockstep.Run",
        )


def _orders(facts: Sequence[ScriptFacts]) -> Iterator[Finding]:
    passes = [each for each in facts[0].passes if each.steps]
    seen: dict[tuple[str, int], PassFacts] = {}
    for each in passes:
        if (
            each.divided
            and each.shuffles
            and (before := seen.get((each.file, each.line)))
            and before.epoch == each.epoch
        ):
            yield problem(
                "order",
                what=f"{_at(each.file, each.line)}: two epochs in the same order",
                why="DistributedSampler shuffles by its epoch, which nobody sets",
                command="sampler.set_epoch(epoch) at the top of each epoch",
            )
            break
        seen[each.file, each.line] = each
    whole = next((each for each in _whole_passes(facts) if each.steps), None)
    if whole is not None:
        yield problem(
            "order",
            what=f"{_at(whole.file, whole.line)}: each rank trains on all {whole.length} samples",
            why="an epoch reads each sample once on each rank, and takes as long as on one",
            command="DataLoader(..., sampler=DistributedSampler(dataset))",
        )


def _whole_passes(facts: Sequence[ScriptFacts]) -> list[PassFacts]:
    """Those passes of the first rank in which each rank reads the same whole data set."""
    return [
        first
        for first, *others in zip(*(each.passes for each in facts), strict=False)
        if facts[0].joined
        and not (first.divided or first.own_order)
        and all((first.length, first.part) == (other.length, other.part) for other in others)
    ]


def _evaluations(facts: Sequence[ScriptFacts]) -> Iterator[Finding]:
    places: dict[tuple[str, int], PassFacts] = {}
    for each in facts[0].passes:
        if each.evaluates and each.watched:
            places.setdefault((each.file, each.line), each)
    for each in places.values():
        where, rest = _at(each.file, each.line), (each.length or 0) % (each.divided or 1)
        if each.divided and rest and not each.drop_last:
            yield problem(
                "evaluation",
                what=f"{where}: {plural(each.divided - rest, 'sample')} of {each.length} counted twice",
                why="DistributedSampler fills up until each rank has as many",
                command="torch.utils.data.Subset(dataset, range(rank, len(dataset), world_size))",
            )
        if each.divided and not each.reductions:
            yield problem(
                "evaluation",
                what=f"{where}: the result is never put together",
                why="each rank has seen a part of the data; what rank 0 prints or judges by is of its part alone",
                command="dist.all_reduce(sums), before a division by the number of samples",
            )
        if each in _whole_passes(facts):
            what = f"{where}: each rank evaluates all {each.length} samples"
            yield note("evaluation", what=what, why="right, and as slow as on one rank", command="Subset, as above")


def _saves(facts: Sequence[ScriptFacts]) -> Iterator[Finding]:
    ranks = grouped(((save.path, save.file, save.line), each.rank) for each in facts for save in each.saves)
    for (path, file, line), writers in ranks.items():
        if len(writers) > 1:
            yield problem(
                "saves",
                what=f"{_at(file, line)}: {format_ranks(writers)} write {relative_path(Path(path))}",
                why="they write into each other's file: what is left may be torn",
                command="if rank == 0: torch.save(...)",
            )


_BY_HAND: Final = (_world, _orders, _evaluations, _saves)


def _at(file: str, line: int) -> str:
    return f"{relative_path(Path(file))}:{line}"
