"""Buffers that the forward pass changes, such as the running statistics of BatchNorm.

    base ──► forward of micro-batch 0 ──► b0     each micro-batch starts from the same base;
    base ──► forward of micro-batch 1 ──► b1     new base = base + mean over the step of (bm - base),
    base ──► ...                                 summed along the tree; of one micro-batch alone, b0 itself

So buffers do not depend on which rank computed which micro-batch, and no rank's statistics overwrite another's.

Whole numbers, such as the count of batches, take the value after one micro-batch: one step counts once. Where the data
decides whether a BatchNorm is called, its count takes the greatest value; any other buffer of whole numbers that
micro-batches of one step change differently is refused, since no value would be right.

Buffers that change are found by `Tensor._version` after each micro-batch, which costs little, and by value in the first
steps and now and then, since a change through ``.data`` or by a kernel does not show in the version. If one module's
buffer changes, buffers of this name in modules of its class are taken to change, too: the data may choose among
experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import AllReduce, Group, TreeAccumulator
from lockstep.errors import LockstepError, UsageError
from lockstep.strategies.parts.gradient_accumulation import as_real
from lockstep.torch_private import foreach_add, foreach_add_, foreach_copy_, foreach_sub, own_buffers, version_of

#: Buffers are compared by value in this many first steps, and then once in `_EVERY_STEPS`; small buffers always.
_FIRST_STEPS = 2
_EVERY_STEPS = 500
_SMALL_BYTES = 1 << 18  # on a CPU: about 10 us
_BITS = 22  # in a part of a whole number that a float32 holds exactly
_PART = (1 << _BITS) - 1


class Buffers:
    """Keeps the buffers of the replicas' models in step.

    Args:
        all_reduce: sums over the replicas.
        group: the replicas; its device holds the sums, also of buffers on the CPU or on other GPUs of a rank.
    """

    def __init__(self, all_reduce: AllReduce, group: Group) -> None:
        self._all_reduce: Final = all_reduce
        self._group: Final = group
        self._models: Final[list[nn.Module]] = []
        self._buffers: list[torch.Tensor] = []
        self._owners: list[tuple[nn.Module, str]] = []  # the module and name of each buffer
        self._none: list[tuple[nn.Module, str]] = []  # buffers that were registered as None
        self._base: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._norms: set[int] = set()  # places of buffers of normalisation layers
        self._same_class_and_name: dict[
            tuple[type[nn.Module], str], list[int]
        ] = {}  # places of buffers of one class and name
        self._sum_type = torch.float32
        self._small = False
        self._has_nonfinite_base = (
            False  # whether some base is not finite, such as a running minimum that begins at infinity
        )
        self._moving: tuple[int, ...] = ()  # places of the buffers that change, as far as this rank knows
        self._agreed: tuple[int, ...] = ()  # places that all ranks have agreed on
        self._fold: TreeAccumulator[torch.Tensor] | None = None
        self._counts: _Counts | None = None
        self._steps = 0

    def setup_model(self, model: nn.Module) -> None:
        """Keep the buffers of ``model`` in step from now on."""
        self._models.append(model)
        self._find_buffers()

    def resync(self) -> None:
        """Take the buffers' current values as the base of the next step; new buffers are kept in step, too."""
        if self._changed_registrations():
            self._find_buffers()
        else:
            self._restore_registered()
            self._begin()

    def check_known(self) -> None:
        """Check that the models still have the buffers from when the loop over micro-batches began.

        Raises:
            UsageError: if not, since the value of a new buffer before the first micro-batch is no longer known.
        """
        _refuse_changed_registrations(self._changed_registrations())

    def use_copies(self) -> None:
        """Let the next forward pass change copies, which `end_micro_batch` copies back.

        For pipelines, where other forward passes come before its backward pass: tensors that autograd has seen must not
        change.
        """
        for i in self._moving:
            owner, name = self._owners[i]
            own_buffers(owner)[name] = self._buffers[i].clone()

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """Restore the base; at the rank's last micro-batch, first move the base by the step's mean. Collective then.

        Raises:
            UsageError: for a buffer without one value for all ranks after a step, by name.
        """
        if not (self._buffers or self._none):
            if position.last and self._is_checking_step:
                self.check_known()
            self._steps += position.last
            return
        self._find_moving()
        # Only at the last micro-batch: ranks have different numbers of micro-batches, and others may wait in the
        # reduction.
        if position.last:
            self._agree_on_moving()
            self._steps += 1
        with torch.no_grad():
            self._accumulate(position)
        self._restore_base()

    def restore(self, *, discards_step: bool = True) -> None:
        """Restore the base; the changes summed in this step are forgotten, unless ``discards_step=False``."""
        if discards_step:
            self._fold = self._counts = None
        with contextlib.suppress(UsageError):  # the user has got this error, or will at the next step
            self._find_moving()
        self._restore_base()

    def _registered(self) -> Iterator[tuple[nn.Module, str, torch.Tensor | None]]:
        """Each buffer once, with a module that holds the buffer and its name in the module."""
        seen: set[int] = set()
        for module in dict.fromkeys(m for model in self._models for m in model.modules()):
            for name, buffer in own_buffers(module).items():
                if buffer is None or id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield module, name, buffer

    def _changed_registrations(self) -> set[str]:
        """The names of buffers that were added or removed since the last `_find_buffers`."""
        known = {(id(m), name) for m, name in (*self._owners, *self._none)}
        return {name for _, name in known ^ {(id(m), name) for m, name, _ in self._registered()}}

    def _find_buffers(self) -> None:
        """Find all buffers of the models now; buffers that changed before are expected to change still."""
        moving = {(id(self._owners[i][0]), self._owners[i][1]) for i in self._agreed}
        registered = list(self._registered())
        self._none = [(module, name) for module, name, buffer in registered if buffer is None]
        there = [(module, name, buffer) for module, name, buffer in registered if buffer is not None]
        self._owners = [(module, name) for module, name, _ in there]
        self._buffers = [buffer for *_, buffer in there]
        # torch's normalisation kernels change running statistics without changing `Tensor._version`.
        self._norms = {i for i, (module, _) in enumerate(self._owners) if isinstance(module, _NormBase)}
        self._same_class_and_name = {}
        for i, (module, name) in enumerate(self._owners):
            self._same_class_and_name.setdefault((type(module), name), []).append(i)
        # One type for all sums, since changing buffers may be found within a step, after the first additions.
        is_wide = any(b.dtype in (torch.float64, torch.complex128) for b in self._buffers)
        self._sum_type = torch.float64 if is_wide else torch.float32
        known = {i for i, (module, name) in enumerate(self._owners) if (id(module), name) in moving}
        self._moving = self._agreed = tuple(sorted(known | self._norms))
        unchanged = [b for i, b in enumerate(self._buffers) if i not in self._moving]
        self._small = (
            all(b.device.type == "cpu" for b in unchanged)
            and sum(b.numel() * b.element_size() for b in unchanged) <= _SMALL_BYTES
        )
        self._steps = 0
        self._begin()

    def _begin(self) -> None:
        self._base = [b.detach().clone() for b in self._buffers]
        self._versions = [version_of(b) for b in self._buffers]
        self._has_nonfinite_base = not _all_finite([b for b in self._base if _has_mean(b)])
        self._fold = self._counts = None

    def _restore_registered(self) -> None:
        """Copy a newly assigned tensor, as by ``self.mean = 0.9 * self.mean``, into the buffer that is kept in step."""
        for buffer, (owner, name) in zip(self._buffers, self._owners, strict=True):
            held = own_buffers(owner).get(name)
            if held is None or held is buffer:
                continue
            if held.shape != buffer.shape:
                raise _changed_shape(owner, name, buffer.shape, held.shape)
            with torch.no_grad():
                buffer.copy_(held)
            own_buffers(owner)[name] = buffer
        for owner, name in self._none:
            if (held := own_buffers(owner).get(name)) is not None:
                raise UsageError(
                    f"the buffer {name} of {type(owner).__name__} was None when run.model(...) was called and is a "
                    f"tensor of shape {tuple(held.shape)} now: its values would differ between ranks. Register it "
                    "with zeros of that shape, or keep what may differ in a plain attribute"
                )

    def _find_moving(self) -> None:
        self._restore_registered()
        changed = {i for i, b in enumerate(self._buffers) if version_of(b) != self._versions[i]}
        unchanged = [i for i in range(len(self._buffers)) if i not in changed and i not in self._moving]
        for i in (*changed.difference(self._moving), *(unchanged if self._by_value else ())):
            if self._buffers[i].shape != self._base[i].shape:  # in place
                owner, name = self._owners[i]
                raise _changed_shape(owner, name, self._base[i].shape, self._buffers[i].shape)
        if self._by_value:
            unversioned = {i for i in unchanged if not same(self._buffers[i], self._base[i])}
            if unversioned and not self._small and self._steps >= _FIRST_STEPS:
                raise UsageError(
                    f"{self._named(unversioned)} began to change through .data or by a kernel after the first steps, "
                    "which cannot be noticed in time: change it in place, as in self.mean.mul_(0.9)"
                )
            changed |= unversioned
        if not changed.issubset(self._moving):
            self._add_moving(
                {
                    kin
                    for i in changed
                    for kin in self._same_class_and_name[type(self._owners[i][0]), self._owners[i][1]]
                }
            )

    def _add_moving(self, places: Iterable[int]) -> None:
        """Add ``places`` to the changing buffers, with a change of 0 in earlier micro-batches of this step."""
        before, self._moving = self._moving, tuple(sorted({*places, *self._moving}))
        if self._moving == before or self._fold is None or not self._fold.nodes:
            return
        known = [i for i in before if _has_mean(self._buffers[i])]
        here = [i for i in self._moving if _has_mean(self._buffers[i])]
        sizes = [as_real(self._base[i]).numel() for i in known]
        bases = [self._base[i] for i in here]
        stayed = {i: self._flatten([move]) for i, move in zip(here, self._changes(bases, bases), strict=True)}
        for number, sums in enumerate(self._fold.sums):
            pieces = stayed | dict(zip(known, sums.split(sizes), strict=True))
            self._fold.sums[number] = self._flatten([pieces[i] for i in here])
        known, here = ([i for i in some if not _has_mean(self._buffers[i])] for some in (before, self._moving))
        if here:
            self._counts = self._counts or _Counts(self._group)
            self._counts.widen(known, here, [self._base[i] for i in here])

    @property
    def _is_checking_step(self) -> bool:
        """Whether this step is one of the first, or one of every `_EVERY_STEPS`."""
        return self._steps < _FIRST_STEPS or self._steps % _EVERY_STEPS == 0

    @property
    def _by_value(self) -> bool:
        """Whether buffers are compared by value in this step."""
        return self._small or self._is_checking_step

    def _agree_on_moving(self) -> None:
        """Agree on the buffers that are kept in step. Collective in the first steps, and for newly found buffers."""
        if self._steps < _FIRST_STEPS:
            own = self._moving, self._changed_registrations()
            for moving, changed_registrations in self._group.gather_objects(
                own, "which buffers the forward pass changes"
            ):
                _refuse_changed_registrations(changed_registrations)
                self._add_moving(moving)
            self._agreed = self._moving
            return
        if self._is_checking_step:
            self.check_known()
        if self._moving != self._agreed:
            new, self._agreed = set(self._moving) - set(self._agreed), self._moving
            try:
                self._group.check_equal("which buffers the forward pass changes", self._agreed)
            except LockstepError:
                # Not chained to that error, which may be a lost peer and would then pass for the cause.
                raise UsageError(
                    f"{self._named(new)} changed for the first time after step {self._steps}, and not on all ranks: "
                    "change it in each forward pass from the first one on, if by nothing, as in self.mean.add_(0)"
                ) from None

    def _restore_base(self) -> None:
        if not self._moving:
            return
        with torch.no_grad():
            _copy([self._buffers[i] for i in self._moving], [self._base[i] for i in self._moving])
        for i in self._moving:
            self._versions[i] = version_of(self._buffers[i])

    def _accumulate(self, position: MicroBatchPosition) -> None:
        real = [i for i in self._moving if _has_mean(self._buffers[i])]
        whole = [i for i in self._moving if not _has_mean(self._buffers[i])]
        if position.of == 1 and self._group.size == 1 and not position.is_padding:
            # The values after this micro-batch are those after the step.
            _copy([self._base[i] for i in self._moving], [self._buffers[i] for i in self._moving])
            if self._has_nonfinite_base:
                self._has_nonfinite_base = not _all_finite([self._base[i] for i in real])
            self._fold = self._counts = None
            return
        if whole and self._counts is None:
            self._counts = _Counts(self._group)
        if not position.is_padding:
            if self._fold is None:
                self._fold = TreeAccumulator(position.of, lambda left, right: left.add_(right))
            here = [self._buffers[i] for i in real]
            moves = here if position.of == 1 else self._changes(here, [self._base[i] for i in real])
            self._fold.push((position.index, position.index + 1), self._flatten(moves))
            if self._counts is not None:
                self._counts.add([self._buffers[i] for i in whole], [self._base[i] for i in whole])
        if position.last:
            if self._moving:
                self._move_base(real, whole, position.of)
            self._fold = self._counts = None

    def _changes(self, here: list[torch.Tensor], base: list[torch.Tensor]) -> list[torch.Tensor]:
        """The change of each buffer from its base by this micro-batch; from zero, where the base is not finite."""
        if self._has_nonfinite_base:
            return [torch.where(b.isfinite(), h - b, h) for h, b in zip(here, base, strict=True)]
        return list(foreach_sub(here, base)) if here else []

    def _move_base(self, real: Sequence[int], whole: Sequence[int], of: int) -> None:
        """Move the base by the mean over all ranks' micro-batches; integers by the change of one micro-batch.

        If the step has one micro-batch, the values after this micro-batch are taken without rounding.
        """
        sums = self._fold.sums if self._fold is not None else []
        bases = [self._base[i] for i in real]
        like = self._flatten(bases)
        if self._counts is not None and self._group.size > 1:
            # This rank's counts, in a row of its own, behind the changes of one of this rank's nodes.
            row = self._counts.row(sum(self._buffers[i].numel() for i in whole), like)
            rows = [row, *(torch.zeros_like(row) for _ in sums[1:])]
            sums = [torch.cat([moves, counts]) for moves, counts in zip(sums, rows, strict=False)]
            like = torch.cat([like, row])
        out = sums[-1] if sums else like
        self._all_reduce.begin(out, sums, of)
        self._all_reduce.finish()
        if bases:
            self._add_mean(bases, out, of)
        if self._counts is not None:
            rest = sum(as_real(b).numel() for b in bases)
            self._add_counts(whole, *self._counts.agreed(out[rest:]))

    def _add_mean(self, bases: list[torch.Tensor], sums: torch.Tensor, of: int) -> None:
        if self._has_nonfinite_base:
            for base in bases:
                base.masked_fill_(~base.isfinite(), 0)
        reals = [as_real(b) for b in bases]
        sizes = [b.numel() for b in reals]
        pieces = sums[: sum(sizes)].div_(of).split(sizes)
        means = [p.view_as(b).to(b.device) for p, b in zip(pieces, reals, strict=True)]
        if of == 1:
            _copy(reals, means)
        else:
            foreach_add_(reals, means)
        if self._has_nonfinite_base:
            self._has_nonfinite_base = not _all_finite(bases)

    def _add_counts(self, places: Sequence[int], low: torch.Tensor, high: torch.Tensor) -> None:
        sizes = [self._buffers[i].numel() for i in places]
        lows, highs = low.split(sizes), high.split(sizes)
        for i, least, most in zip(places, lows, highs, strict=True):
            on_cpu = self._base[i].device.type == "cpu"
            if i not in self._norms and (self._by_value or on_cpu) and bool((least != most).any()):
                raise UsageError(
                    f"{self._named([i])} holds integers that depend on the data: the micro-batches of one step changed "
                    f"it by {least.min()} to {most.max()}, and after a step all ranks need one value. Count with "
                    "run.measure(...), in floating point (then it becomes the mean), or by the same amount in each "
                    "forward pass; compute what follows from other buffers, such as a zero point, in forward() again"
                )
        bases = [self._base[i] for i in places]
        moves = [most.view(base.shape).to(base.device) for base, most in zip(bases, highs, strict=True)]
        _copy(bases, list(foreach_add([base.long() for base in bases], moves)))

    def _named(self, places: Sequence[int] | set[int]) -> str:
        names = [f"{name} of {type(owner).__name__}" for owner, name in (self._owners[i] for i in sorted(places))]
        return f"the buffer{'s' if len(names) > 1 else ''} {', '.join(names[:5])}"

    def _flatten(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The ``tensors`` in one tensor of one dimension and of the type of sums; complex numbers are two reals."""
        flats = [as_real(t).reshape(-1) for t in tensors]
        whole = torch.zeros(0, dtype=self._sum_type, device=self._group.device)
        return torch.cat([whole, *(flat.to(self._group.device) for flat in flats)])


class _Counts:
    """The least and the greatest change of integers over a rank's micro-batches of a step, and over all ranks'.

    rank 0   | 1 low high |            |            |
    rank 1   |            | 1 low high |            |     each rank adds a row with its own part filled;
    rank 2   |            |            | 0          |     a 1 tells that it had a micro-batch

    A row is summed in floating point, so each integer is cut into three parts that any float type holds exactly.
    """

    def __init__(self, group: Group) -> None:
        self._rank, self._size, self._device = group.rank, group.size, group.device
        self.low: torch.Tensor | None = None
        self.high: torch.Tensor | None = None

    def add(self, buffers: Sequence[torch.Tensor], bases: Sequence[torch.Tensor]) -> None:
        """Include the change of ``buffers`` from their ``bases`` by one micro-batch."""
        move = self._moves(buffers, bases)
        self.low = move if self.low is None else torch.minimum(self.low, move)
        self.high = move if self.high is None else torch.maximum(self.high, move)

    def widen(self, known: Sequence[int], here: Sequence[int], like: Sequence[torch.Tensor]) -> None:
        """Extend the counts from the buffers ``known`` to ``here``, with values ``like``: new ones changed by 0."""
        stayed = {i: self._moves([one], [one]) for i, one in zip(here, like, strict=True)}
        sizes = [stayed[i].numel() for i in known]

        def widened(flat: torch.Tensor | None) -> torch.Tensor:
            pieces = stayed if flat is None else stayed | dict(zip(known, flat.split(sizes), strict=True))
            return torch.cat([pieces[i] for i in here])

        self.low, self.high = widened(self.low), widened(self.high)

    def row(self, numbers: int, like: torch.Tensor) -> torch.Tensor:
        """This rank's row for ``numbers`` integers, and zeros for other ranks' rows; type and device are ``like``'s."""
        row = like.new_zeros(self._size, 1 + 3 * 2 * numbers)
        if self.low is not None and self.high is not None:
            ends = torch.cat([self.low, self.high])
            parts = (ends & _PART, ends >> _BITS & _PART, ends >> 2 * _BITS)
            row[self._rank] = torch.cat([ends.new_ones(1), *parts])
        return row.view(-1)

    def _moves(self, buffers: Sequence[torch.Tensor], bases: Sequence[torch.Tensor]) -> torch.Tensor:
        moves = foreach_sub([b.long() for b in buffers], [b.long() for b in bases])
        return torch.cat([move.reshape(-1).to(self._device) for move in moves])

    def agreed(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the greatest change of each integer over all ranks, from the sum of the ranks' rows."""
        if self._size == 1:
            assert self.low is not None
            assert self.high is not None
            return self.low, self.high
        table = rows.view(self._size, -1)
        present = table[:, :1] > 0
        low, middle, high = table[:, 1:].long().view(self._size, 3, -1).unbind(1)
        least, most = (low + (middle << _BITS) + (high << 2 * _BITS)).chunk(2, 1)
        bounds = torch.iinfo(torch.int64)
        return torch.where(present, least, bounds.max).amin(0), torch.where(present, most, bounds.min).amax(0)


def _refuse_changed_registrations(names: set[str]) -> None:
    if names:
        raise UsageError(
            f"buffers were added to the model or taken away within a step ({', '.join(sorted(names))}); change modules "
            "that have buffers before run.train(...) or after it"
        )


def _has_mean(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _copy(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy ``values`` into ``into``, all of one type at once, since torch copies mixed types one by one."""
    alike: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for to, value in zip(into, values, strict=True):
        for some, one in zip(alike.setdefault((to.dtype, value.dtype), ([], [])), (to, value), strict=True):
            some.append(one)
    for some, others in alike.values():
        foreach_copy_(some, others)


def _all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all values of ``tensors`` are finite; waits for a GPU, once."""
    if not tensors:
        return True
    found = [t.isfinite().all() for t in tensors]
    return bool(torch.stack([f.to(found[0].device) for f in found]).all())


def _changed_shape(owner: nn.Module, name: str, before: torch.Size, now: torch.Size) -> UsageError:
    return UsageError(
        f"the buffer {name} of {type(owner).__name__} changed its shape from {tuple(before)} to {tuple(now)}: buffers "
        "are averaged over the step, so keep the shape. Where the first forward pass gives a buffer its shape, make it "
        "before run.model(...); or hold the value in a plain attribute and give it to run.keep(...)"
    )


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both hold the same values, with NaN in the same places. Waits for the GPU."""
    return torch.equal(one, other) or bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
