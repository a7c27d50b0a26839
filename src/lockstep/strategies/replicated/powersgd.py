"""PowerSGD: ranks send two thin factors of each gradient matrix.

A matrix of n rows and m columns is approximated by ``p.T @ q``, where p has r orthonormal rows of length n, and q has r
rows of length m. Every rank starts a step from the same q; the errors e are a rank's own, and g is its gradient::

    on each rank     e += g                earlier errors count now
                     p  = q @ e.T          r x n   ──►  summed over ranks, then made orthonormal
                     q  = p @ e            r x m   ──►  summed over ranks
                     e -= p.T @ own q      what this rank's share of the step leaves out
    everywhere       gradient = p.T @ q

Both sums cover all matrices of all models, so a step sends two messages, however many layers there are; parameters that
are no matrices are sent whole with the first. No gradient is lost: at any time, the gradients applied so far and the
errors of all ranks add up to the true gradients.

Thijs Vogels, Sai Praneeth Karimireddy, Martin Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization (2019), arXiv 1905.13727, algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import nn

from lockstep.collectives import Group, RankOrderAllReduce, TensorShard
from lockstep.seeding import seed_of
from lockstep.strategies.replicated.compression import Compression
from lockstep.strategies.strategy import StateDict
from lockstep.torch_private import foreach_add_, foreach_copy_


class PowerSGD(Compression):
    """A `Compression` that sends low-rank approximations.

    Args:
        group: whose gradients are summed.
        rank: r, the rank of the approximations.
        start: number of first steps in which gradients are summed uncompressed.
        may_skip: whether steps with gradients that are not finite are skipped, so that such gradients must not become
            errors. Costs a look at all gradients and one more message, of a single number.
    """

    def __init__(self, group: Group, *, rank: int, start: int, may_skip: bool) -> None:
        self._group: Final = group
        self._rank: Final = rank
        self._start: Final = start
        self._may_skip: Final = may_skip
        self._sums: Final = RankOrderAllReduce(group)
        self._models: Final[list[_Factors]] = []
        self._factors_of: Final[dict[int, _Factors]] = {}  # by the ids of parameters
        self._gradients: dict[int, torch.Tensor] = {}  # begun in this step, by the ids of parameters
        self._flats: dict[int, list[torch.Tensor]] = {}  # begun in this step, by the number of their model

    def setup_model(self, model: nn.Module) -> None:
        """Prepare for the gradients of ``model``. Collective, with equal models in the same order."""
        factors = _Factors(model, self._rank, len(self._models))
        self._models.append(factors)
        self._factors_of.update({id(p): factors for p in model.parameters()})

    def begin(self, flat: torch.Tensor, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Keep the gradients until `finish`; in the first ``start`` steps, begin their sum. Collective."""
        factors = self._factors_of[id(parameters[0])]
        self._flats.setdefault(factors.number, []).append(flat)
        if factors.steps < self._start:
            self._sums.begin(flat)
        else:
            self._gradients.update({id(p): g for p, g in zip(parameters, gradients, strict=True)})

    def finish(self) -> None:
        """Sum the approximations of all gradients that were begun, of all models at once. Collective."""
        gradients, self._gradients = self._gradients, {}
        flats, self._flats = self._flats, {}
        # In the order of models, not of buckets, which DDP cuts again after the first step.
        begun = [self._models[number] for number in sorted(flats)]
        compressed = [factors for factors in begun if factors.steps >= self._start]
        self._sums.finish()
        if compressed:
            compressed_flats = [flat for factors in compressed for flat in flats[factors.number]]
            if self._may_skip and self._any_not_finite(compressed_flats):
                for flat in compressed_flats:
                    flat.fill_(math.nan)  # so that every rank skips the step
            else:
                self._sum(compressed, gradients)
        for factors in begun:
            factors.steps += 1

    def state_dict(self) -> StateDict:
        """For each model the number of steps, q, and every rank's errors."""
        return {"models": [factors.state(self._group) for factors in self._models]}

    def load_state_dict(self, state: StateDict) -> None:
        """Load ``state``, of `state_dict`; empty: start over. Collective.

        With the number of ranks of before, the training goes on with the same bits. Another number of ranks divides the
        sum of all errors evenly, so that still no gradient is lost. If the rank r has changed, q starts over.
        """
        saved = state.get("models", [])
        for factors in self._models:
            factors.load(saved[factors.number] if factors.number < len(saved) else {}, self._group)

    def close(self) -> None:
        """End the threads and connections."""
        self._sums.close()

    def _any_not_finite(self, flats: Sequence[torch.Tensor]) -> bool:
        """Whether some rank holds a number that is not finite."""
        found = torch.stack([flat.isfinite().all() for flat in flats]).all().logical_not().float().reshape(1)
        self._sums.begin(found)
        self._sums.finish()
        return bool(found.item())

    @torch.no_grad()
    def _sum(self, models: Sequence[_Factors], gradients: Mapping[int, torch.Tensor]) -> None:
        for factors in models:
            factors.open()
        vectors = [gradients[id(p)] for factors in models for p in factors.vectors]
        stacks = [stack for factors in models for stack in factors.stacks]
        stack_gradients = [[gradients[id(p)] for p in stack.parameters] for stack in stacks]

        ps = []
        for stack, own_gradients in zip(stacks, stack_gradients, strict=True):
            foreach_add_(stack.errors_as(own_gradients), own_gradients)
            ps.append(torch.bmm(stack.q, stack.error.mT))
        message, pieces = _packed([*vectors, *ps])
        self._sums.begin(message)
        self._sums.finish()
        if vectors:
            foreach_copy_(vectors, pieces[: len(vectors)])

        own = []
        for stack, p, summed in zip(stacks, ps, pieces[len(vectors) :], strict=True):
            orthonormalize(p.copy_(summed))
            own.append(torch.bmm(p, stack.error))
        if not stacks:
            return
        message, pieces = _packed(own)
        self._sums.begin(message)
        for stack, p, q in zip(stacks, ps, own, strict=True):
            stack.error.baddbmm_(p.mT, q, alpha=-1)
        self._sums.finish()
        for stack, own_gradients, p, q, summed in zip(stacks, stack_gradients, ps, own, pieces, strict=True):
            _multiply_into(own_gradients, p, q.copy_(summed))
            stack.remember(q)


class _Stack:
    """The matrices of a model that have equal shape, stacked in one tensor."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], rank: int) -> None:
        self.names: Final = tuple(names)
        self.parameters: Final = tuple(parameters)
        rows, columns = _shape_of(parameters[0])
        dtype, device = _dtype_of(parameters[0]), parameters[0].device
        self.error: Final = torch.zeros(len(names), rows, columns, dtype=dtype, device=device)
        self.q: Final = torch.stack([_first_q(name, rank, columns) for name in names]).to(device, dtype)

    def errors_as(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The errors, each with the shape of its counterpart of ``tensors``."""
        return [error.view(tensor.shape) for error, tensor in zip(self.error.unbind(), tensors, strict=True)]

    def remember(self, q: torch.Tensor) -> None:
        """Begin the next step from ``q``, with rows scaled to length 1.

        A row of zeros, as after a step without gradient, would stay zero for ever: then the old row is kept.
        """
        length = torch.linalg.vector_norm(q, dim=2, keepdim=True)
        self.q.copy_(torch.where(length > 0, q / length, self.q))


class _Factors:
    """The factors and errors of a model; no memory is taken before the first compressed step."""

    def __init__(self, model: nn.Module, rank: int, number: int) -> None:
        self.number: Final = number
        self.steps = 0
        self.stacks: list[_Stack] = []
        self._rank: Final = rank
        self._matrices: Final[dict[object, dict[str, nn.Parameter]]] = {}
        self.vectors: Final[list[nn.Parameter]] = []  # parameters that are sent whole
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            rows, columns = _shape_of(parameter)
            if parameter.is_floating_point() and (rows + columns) * rank < rows * columns:
                alike = (rows, columns, parameter.dtype, parameter.device)
                self._matrices.setdefault(alike, {})[name] = parameter
            else:
                self.vectors.append(parameter)

    def open(self) -> None:
        """Make the stacks, unless they exist."""
        if not self.stacks:
            self.stacks = [_Stack(list(m), list(m.values()), self._rank) for m in self._matrices.values()]

    def state(self, group: Group) -> StateDict:
        """The steps made; q and the errors by the parameters' names."""
        qs, errors = {}, {}
        for stack in self.stacks:
            for name, q, error in zip(stack.names, stack.q, stack.error, strict=True):
                qs[name] = q
                errors[name] = TensorShard(error[None], (group.rank, 0, 0), (group.size, *error.shape), error.dtype)
        return {"steps": self.steps, "q": qs, "errors": errors}

    def load(self, state: StateDict, group: Group) -> None:
        """Load a `state` with whole errors; values that the state lacks start over."""
        self.steps = state.get("steps", 0)
        self.stacks = []
        qs, errors = state.get("q", {}), state.get("errors", {})
        if not qs:
            return
        self.open()
        for stack in self.stacks:
            for name, q, error in zip(stack.names, stack.q, stack.error, strict=True):
                if name in qs and qs[name].shape == q.shape:
                    q.copy_(qs[name])
                if name in errors and errors[name].shape[1:] == error.shape:
                    error.copy_(_share(errors[name], group))


def orthonormalize(rows: torch.Tensor) -> None:
    """Make the rows of each matrix orthonormal, in place; a row that depends on the rows above becomes zero.

    Args:
        rows: of shape (matrices, rows, columns), of a real floating type.

    By Gram-Schmidt, over all matrices at once, with two passes per row, since one pass leaves a row that nearly depends
    on the others far from orthogonal. For few rows this is several times faster than a QR decomposition.
    """
    smallest = torch.finfo(rows.dtype).eps
    for place in range(rows.shape[1]):
        row = rows[:, place]
        before = torch.linalg.vector_norm(row, dim=1, keepdim=True)
        if place:
            above = rows[:, :place]
            for _ in range(2):
                row.sub_(torch.bmm(torch.bmm(row[:, None], above.mT), above)[:, 0])
        length = torch.linalg.vector_norm(row, dim=1, keepdim=True)
        # Rows that are not finite stay so, for later checks to see.
        row.mul_(torch.where(length <= smallest * before, 0.0, 1.0 / length))


def _multiply_into(gradients: Sequence[torch.Tensor], p: torch.Tensor, q: torch.Tensor) -> None:
    """Set each of ``gradients`` to its ``p.T @ q``."""
    for gradient, tall, wide in zip(gradients, p.mT, q, strict=True):
        if gradient.dtype == p.dtype and gradient.is_contiguous():
            torch.mm(tall, wide, out=gradient.view(tall.shape[0], wide.shape[1]))
        else:
            gradient.copy_(torch.mm(tall, wide).view(gradient.shape))


def _packed(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """All ``tensors`` in one new tensor of one dimension, and each as a view of this tensor."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return flat, [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _shape_of(parameter: torch.Tensor) -> tuple[int, int]:
    """The shape of ``parameter`` as a matrix: the first dimension by all others."""
    return (parameter.shape[0], math.prod(parameter.shape[1:])) if parameter.dim() > 1 else (1, parameter.numel())


def _dtype_of(parameter: torch.Tensor) -> torch.dtype:
    """The type of errors, at least fp32: in a type of two bytes, errors would be lost in rounding."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _first_q(name: str, rank: int, columns: int) -> torch.Tensor:
    """Random rows of length 1, equal on all ranks for equal names."""
    generator = torch.Generator().manual_seed(seed_of("powersgd", name))
    return nn.functional.normalize(torch.randn(rank, columns, generator=generator, device="cpu"), dim=1)


def _share(errors: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's share of the errors of all ranks that saved."""
    return errors[group.rank] if len(errors) == group.size else errors.sum(0) / group.size
