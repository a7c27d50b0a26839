"""Embeddings on servers: which server holds each one, its look-ups, and the gradients of a step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch._C._distributed_autograd import get_gradients  # what torch.distributed exports, with types
from torch.utils import _pytree as pytree

from lockstep.collectives import TreeAccumulator, fold

EmbeddingTable = nn.Embedding | nn.EmbeddingBag


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """A worker's request for rows of a table."""

    table: int  #: its number
    inputs: tuple[Any, ...]  #: of its forward pass, in the memory of the CPU
    named: Mapping[str, Any]  #: likewise
    worker: int
    context: int | None  #: of distributed autograd; None: no backward pass follows


@dataclass(frozen=True, slots=True)
class GradientRequest:
    """A worker's backward pass is done: its gradients on this server may be folded."""

    worker: int
    context: int  #: of distributed autograd
    index: int  #: of the micro-batch
    of: int  #: micro-batches of the step


Gradients = list[torch.Tensor | None]
"""Of the tables of one server, by one worker; None for one that was not looked up."""


class EmbeddingTables:
    """The embeddings on servers: which server holds each one, and there, the gradients of the step."""

    def __init__(self, rank: int) -> None:
        self._rank: Final = rank
        self._tables: Final[list[EmbeddingTable]] = []
        self._servers: Final[list[int]] = []
        self._looked_up: Final[dict[int, tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]]] = {}
        self._folds: Final[dict[int, TreeAccumulator[Gradients]]] = {}  # of this step, by worker

    def add(self, table: EmbeddingTable, server: int) -> int:
        """Keep ``table`` on ``server``, and free its memory on other ranks; its number, the same on all ranks."""
        self._tables.append(table)
        self._servers.append(server)
        if server != self._rank:
            weight = table.weight
            # Its shape is kept, for optimizers and checkpoints; code that reads it without a look-up sees NaN.
            weight.data = weight.new_full([1] * weight.dim(), torch.nan).expand(weight.shape)
        return len(self._tables) - 1

    def server_of(self, number: int) -> int:
        """The server of the table of this number."""
        return self._servers[number]

    @property
    def weights(self) -> list[torch.Tensor]:
        """Of the tables on this server."""
        held = zip(self._tables, self._servers, strict=True)
        return list(dict.fromkeys(table.weight for table, server in held if server == self._rank))

    def look_up(self, lookup: LookupRequest) -> torch.Tensor:
        """Look up rows, on a server; distributed autograd will bring their gradients back here."""
        table = self._tables[lookup.table]
        inputs, named = to_device((lookup.inputs, dict(lookup.named)), table.weight.device)
        if lookup.context is None:
            with torch.no_grad():
                rows: torch.Tensor = table(*inputs, **named)
                return rows.cpu()
        leaf = table.weight.detach().requires_grad_(table.weight.requires_grad)
        self._leaves(lookup.worker, lookup.context).append((table.weight, leaf))
        # Other workers may look up at the same time, so it is a copy of the table, not the table, that has the leaf.
        twin = copy.copy(table)
        twin._parameters = {"weight": leaf}  # type: ignore[dict-item]
        rows = twin(*inputs, **named)
        return rows.cpu()

    def accumulate(self, lookup: GradientRequest) -> None:
        """Fold the gradients that a micro-batch's backward pass has left on this server."""
        leaves = self._leaves(lookup.worker, lookup.context)
        found = get_gradients(lookup.context) if leaves else {}
        sums: dict[torch.Tensor, torch.Tensor] = {}
        for weight, leaf in reversed(leaves):
            gradient = found.get(leaf)
            if gradient is not None:
                sums[weight] = gradient + sums[weight] if weight in sums else gradient
        leaves.clear()
        if lookup.worker not in self._folds:
            self._folds[lookup.worker] = TreeAccumulator(lookup.of, _merge)
        self._folds[lookup.worker].push((lookup.index, lookup.index + 1), [sums.get(weight) for weight in self.weights])

    def write_gradients(self, micro_batches: int) -> None:
        """Set ``.grad`` of this server's tables to the sum over the step; None for tables that were not looked up."""
        folds = [self._folds[worker] for worker in sorted(self._folds)]
        self._folds.clear()
        sums = [gradients for one in folds for gradients in one.sums]
        total = fold(micro_batches, [node for one in folds for node in one.nodes], sums, _merge)
        for weight, gradient in zip(self.weights, total, strict=True):
            weight.grad = gradient

    def discard_step(self) -> None:
        """Drop the gradients of the step; while no worker computes."""
        self._folds.clear()
        self._looked_up.clear()

    def _leaves(self, worker: int, context: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The leaves of a worker's look-ups in a context, in their order; those of its earlier contexts are dropped."""
        known, leaves = self._looked_up.get(worker, (context, []))
        if known != context:
            leaves = []
        self._looked_up[worker] = (context, leaves)
        return leaves


def _merge(left: Gradients, right: Gradients) -> Gradients:
    """Add gradients, dense or sparse; where one is missing, the other one is the sum."""
    pairs = zip(left, right, strict=True)
    return [b if a is None else a if b is None else a.add_(b) for a, b in pairs]


def to_device(values: Any, device: torch.device) -> Any:
    """Copy ``values``, nested, with all tensors on ``device``."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), values)
