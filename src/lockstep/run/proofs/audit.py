"""The audit: now and then two ranks compute the same micro-batch, and must agree before the update, bit for bit.

rank 0     0 1 2 7' 3        7' on rank 0 must be 7 on rank 2      which of each rank's, and where it is computed
rank 1     4 5 2' 6          2' on rank 1 must be 2 on rank 0      again, the step's seed says
rank 2     8 7 5' 9          5' on rank 2 must be 5 on rank 1

If two results differ, the step is dropped, and all ranks compute the micro-batch again. Ranks whose bits differ from
those of most, or from their own, are accused. A single rank makes all computations itself.

Between the end of such a step and the next update no code writes to parameters and states of optimizers, nor to buffers
and kept tensors until the next body begins. So their bytes are compared with those from before.
"""

from __future__ import annotations

import socket
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import torch

from lockstep.collectives import local_part
from lockstep.errors import AuditError, MismatchError
from lockstep.formatting import format_ranks, grouped
from lockstep.run.checks.divergence import checksums, tensors_in
from lockstep.run.proofs.replay import Digest, Notes, Played, ReplayError, first_difference, place_of
from lockstep.run.setup.run_context import RunContext
from lockstep.torch_private import version_of

_PLAYS: Final = "micro-batches that are audited"
_WHAT_TO_DO: Final = (
    "Look at its device (for a GPU: its ECC errors in nvidia-smi -q, and its diagnosis by dcgmi diag -r 3), and do not "
    "train on it until it is known to be good. lockstep run --max-restarts N goes on without it"
)
_IN_STEP: Final = 2  # kinds of tensors that stay as they are until the next update: parameters, states of optimizers


class Verdict(NamedTuple):
    """The verdict on ranks from all computations of a micro-batch."""

    wrong: frozenset[int]  #: ranks whose bits differ from those of most, or from their own; empty: not known
    unsteady: frozenset[int]  #: ranks whose two results differ
    right: Digest  #: the result of most ranks
    other: Digest  #: a different result


def judged(plays: Sequence[tuple[int, Digest]]) -> Verdict | None:
    """The verdict from all computations of a micro-batch, each with its rank; None if they agree."""
    kinds: list[list[tuple[int, Digest]]] = []
    for play in plays:
        alike = next((kind for kind in kinds if not kind[0][1].differs(play[1])), None)
        if alike is None:
            kinds.append([play])
        else:
            alike.append(play)
    if len(kinds) < 2:
        return None
    ranks = [frozenset(rank for rank, _ in kind) for kind in kinds]
    times = Counter(rank for each in ranks for rank in each)
    unsteady = frozenset(rank for rank, gave in times.items() if gave > 1)
    order = sorted(range(len(kinds)), key=lambda number: (-len(ranks[number]), -len(kinds[number])))
    is_clear = len(ranks[order[0]]) > len(ranks[order[1]])
    wrong = frozenset().union(*(ranks[number] for number in order[1:])) if is_clear else unsteady
    return Verdict(wrong, unsteady, kinds[order[0]][0][1], kinds[order[1]][0][1])


class _Stored(NamedTuple):
    name: str
    tensor: torch.Tensor
    version: int  # version counter
    kind: int  # place in `Audit._tensors`


class Audit:
    """The audit of a run, on one rank; does nothing in steps that are not audited.

    Args:
        context: of the run.
    """

    def __init__(self, context: RunContext) -> None:
        self._context: Final = context
        self._group: Final = context.group
        self._plays: Final[list[Played]] = []  # of the step
        self.disputed: tuple[int, ...] = ()  #: the micro-batches with different results
        self._good: int | None = None  # the step up to which no audit of this process has found an error
        self._stored: list[tuple[_Stored, int]] = []  # at the end of an audited step, with checksums

    # ---- what is computed ----------------------------------------------------------------------------------------

    def note(self, played: Played) -> None:
        """A micro-batch of an audited step was computed."""
        self._plays.append(played)

    def agrees(self) -> bool:
        """Whether all computations of the step's micro-batches agree, asked before the update. Collective.

        If not, `disputed` has the micro-batches with different results, equal on all ranks. Waits for the GPU.
        """
        verdicts = self._verdicts()
        self.disputed = tuple(verdicts)
        if not verdicts:
            self._plays.clear()
            self._good = self._context.position.progress.step + 1
        return not verdicts

    def _verdicts(self) -> dict[int, Verdict]:
        told = self._group.gather_objects([play.digest() for play in self._plays], _PLAYS)
        by_place = grouped((digest.place, (rank, digest)) for rank, digests in enumerate(told) for digest in digests)
        found = {place: judged(plays) for place, plays in sorted(by_place.items())}
        return {place: verdict for place, verdict in found.items() if verdict is not None}

    def error(self, *, reads_world_size: bool) -> MismatchError | ReplayError:
        """The error that names the wrong ranks, after all ranks have computed disputed micro-batches again. Collective.

        Checkpoints since the last audit without an error are set aside.
        """
        verdicts = self._verdicts()
        self._context.checkpointer.go_back(self._good or 0)
        index, verdict = next(iter(verdicts.items()))
        difference = self._difference(index, verdict)
        first = next(play for play in self._plays)
        place = place_of(index, first.of, first.step)
        if any(self._group.gather_objects(reads_world_size, "whether a body has read run.world_size")):
            return ReplayError(difference, place, reads_world_size=True)
        who = self._group.gather_objects(self._own(), "hosts and devices")
        wrong = sorted(frozenset().union(*(each.wrong for each in verdicts.values())))
        unsteady = frozenset().union(*(each.unsteady for each in verdicts.values()))
        names = [who[rank] for rank in wrong]
        ranks = self._group.size
        more = f" and {len(verdicts) - 1} more of the step were" if len(verdicts) > 1 else " was"
        head = (
            f"{place}{more} computed several times from the same parameters, buffers and random numbers, and "
            f"{difference}"
        )
        end = "The step was dropped before its update"
        if not wrong:
            involved = " and ".join(who) + self._apart(ranks - 1, [ranks - 1])
            advice = "Start on three ranks or more, which can, or" if ranks == 2 else "Start"
            return AuditError(
                f"{head}: {involved} gave as many times one result as another, and the same ones again, so some of "
                f"them compute or store wrongly, and it cannot be told which. {end}. {advice} on some of the devices "
                "alone",
                (),
                f"{format_ranks(range(ranks))} compute different bits, and it cannot be told which are wrong",
            )
        how = ", ".join(
            f"{who[rank]} gave other bits {'once' if rank in unsteady else 'each time'}{self._apart(rank, wrong)}"
            for rank in wrong
        )
        if ranks > 1 and len(wrong) == ranks:
            return AuditError(
                f"{head}: {how}. {end}. Where all ranks differ, the loop's body may be no function of its micro-batch, "
                "such as by a counter of its own; else look at each of these devices",
                (),
                f"all {ranks} ranks compute different bits each time",
            )
        return AuditError(
            f"{head}: {how}. {end}. {_WHAT_TO_DO}",
            tuple(wrong),
            f"{' and '.join(names)} computed wrong bits",
        )

    def _difference(self, index: int, verdict: Verdict) -> str:
        """The first difference between the two results, in words. Collective."""
        own: list[tuple[Digest, Notes]] = [(p.digest(), p.play.notes()) for p in self._plays if p.place == index]
        plays = [each for of_rank in self._group.gather_objects(own, "what was computed") for each in of_rank]
        right, other = (
            next(notes for digest, notes in plays if not digest.differs(one)) for one in (verdict.right, verdict.other)
        )
        return first_difference(right, other)

    def _apart(self, rank: int, wrong: Sequence[int]) -> str:
        """The difference in the state of ``rank`` from a rank that was right, in words. Collective."""
        part = self._context.strategy.state_part
        if part is None or part.divides_models or self._group.size == 1:
            return ""
        held = {one.name: one.tensor for one in self._tensors() if one.kind in (0, 2)}
        sums = dict(zip(held, checksums(list(held.values())), strict=True))
        by_rank = self._group.gather_objects(sums, "checksums of models")
        rest = [each for number, each in enumerate(by_rank) if number not in wrong]
        odd = next((name for name, found in by_rank[rank].items() if rest and rest[0].get(name) != found), "")
        others = "the others" if self._group.size > 2 else "the other one"
        return f" (which holds other bytes of {odd} than {others})" if odd else ""

    def _own(self) -> str:
        rank, ranks = self._group.rank, self._group.size
        return f"rank {rank} of {ranks} (host {socket.gethostname()}, {self._context.device})"

    # ---- what is stored ------------------------------------------------------------------------------------------

    def note_stored(self) -> bool:
        """Note checksums of the state after an audited step. Costs two passes over the state until the next update.

        Collective. Returns whether ranks hold equal values of undivided state. Waits for the GPU.
        """
        self._stored = self._with_sums(list(self._tensors()))
        if self._group.size == 1:
            return True
        part = self._context.strategy.state_part
        divided = {0, 1} if part is None or part.divides_models else {1} if part.of > 1 else set()
        alike = [(each.name, found) for each, found in self._stored if each.kind not in divided]
        return (
            len(set(self._group.gather_objects(zlib.crc32(repr(alike).encode()), "a checksum of what is stored"))) == 1
        )

    def require_stored(self, *, between: bool) -> None:
        """Check that bytes noted by `note_stored` are unchanged; with ``between``, before the next step's body.

        Asks no other rank.

        Raises:
            AuditError: on this rank alone, if bytes have changed without being written.
        """
        if not self._stored and self._good is not None:
            return
        seen = [each for each in self._stored if (each[0].kind >= _IN_STEP) == between]
        self._stored = [each for each in self._stored if each[0].kind < _IN_STEP] if between else []
        step = self._context.position.progress.step
        self._good = step if self._good is None else self._good
        for (now, found), (_, before) in zip(self._with_sums([each for each, _ in seen]), seen, strict=True):
            if found != before and version_of(now.tensor) == now.version:
                until = f"the {'beginning' if between else 'update'} of step {step + 1}"
                raise AuditError(
                    f"{self._own()}: bytes of {now.name} have changed between the end of step {step} and {until}, and "
                    f"nothing has written to it: its memory, or a write past the end of something else. {_WHAT_TO_DO}",
                    (self._group.rank,),
                    f"{self._own()} holds bytes that nothing has written",
                )

    def forget(self) -> None:
        """The loop is left: the script may change anything now."""
        self._plays.clear()
        self._stored = []

    @staticmethod
    def _with_sums(stored: list[_Stored]) -> list[tuple[_Stored, int]]:
        return list(zip(stored, checksums([each.tensor for each in stored]), strict=True))

    def _tensors(self) -> Iterator[_Stored]:
        state = self._context.state
        named = {id(p): name for model in state.models for name, p in model.named_parameters()}
        of_optimizers = (
            (f"{key} of {named.get(id(p), 'a parameter')} in {type(optimizer).__name__}", value)
            for optimizer in state.optimizers
            for p, values in optimizer.state.items()
            for key, value in values.items()
        )
        kept = {f"keep({name}=...)": value.state_dict() for name, value in state.kept.items()}
        kinds: tuple[Iterable[tuple[str, object]], ...] = (
            ((named.get(id(p), "a parameter"), p) for parameters in state.parameters for p in parameters),
            of_optimizers,
            ((f"the buffer {name}", buffer) for name, buffer in state.buffers),
            tensors_in(kept),
        )
        for kind, tensors in enumerate(kinds):
            for name, value in tensors:
                if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
                    local = local_part(value.detach())
                    if not local.is_inference():
                        yield _Stored(name, local, version_of(local), kind)
