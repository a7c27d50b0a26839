"""The blocks of `fully_shard`: when each block is gathered, and when a rank holds only its rows again.

a block is called      gathered, computed, freed; noted, since all ranks must call the same blocks
its backward pass      gathered again, computed, freed
anything else          `reshard` has freed gathered blocks: a script reads and changes the rows
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Final, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lockstep.collectives import Group
from lockstep.strategies.not_whole.held_parameters import HeldParameters
from lockstep.strategies.sharded.finished_blocks import FinishedBlocks
from lockstep.strategies.sharded.prefetch import Prefetch
from lockstep.torch_private import knows_its_root


class ShardedBlocks:
    """The blocks of all models; each model is a block, too.

    Args:
        group: all ranks.
        prefetch: gathers blocks ahead.
        strategy: its name.
        keeps_gathered: whether blocks stay gathered until the step's last backward pass.
    """

    def __init__(self, group: Group, prefetch: Prefetch, strategy: str, *, keeps_gathered: bool) -> None:
        self._group: Final = group
        self._prefetch: Final = prefetch
        self._finished: Final = FinishedBlocks()
        self._strategy: Final = strategy
        self._keeps_gathered: Final = keeps_gathered
        self._blocks: Final[list[FSDPModule]] = []
        self._roots: Final[list[FSDPModule]] = []
        self._held: Final[list[HeldParameters]] = []
        self._calls = 0  # a checksum of the called blocks, in order
        self._evaluates = self._computes_step = False

    def add(self, model: nn.Module, module: nn.Module, own: Collection[nn.Parameter]) -> None:
        """Add a ``module`` of ``model`` after `fully_shard`; ``own`` are its parameters, without inner blocks'."""
        block = cast(FSDPModule, module)
        self._blocks.append(block)
        self._held.append(HeldParameters(model, module, own, self._strategy))
        if own:
            self._finished.add(block)
        module.register_forward_pre_hook(partial(self._note_call, len(self._blocks), block), prepend=True)

    def add_model(self, model: nn.Module, blocks: Sequence[FSDPModule]) -> None:
        """Add ``model``, after its ``blocks``, which include the model itself."""
        self._roots.append(cast(FSDPModule, model))
        if callable(getattr(model, "generate", None)):
            # Models of transformers use parameters in generate() outside of forward(): an encoder is called directly.
            register_fsdp_forward_method(model, "generate")
        else:
            model.register_forward_hook(partial(self._reshard_after_looking, blocks))

    def begin_micro_batch(self, *, compares: bool) -> None:
        """Begin a forward pass with a backward pass; ``compares``: gathered parameters are compared around it."""
        self._computes_step = True
        self._finished.forget()
        for held in self._held:
            held.compares_marks = compares

    @contextlib.contextmanager
    def computing_gradients(self, *, is_last: bool) -> Iterator[None]:
        """A context for a backward pass, ``is_last`` of the step on this rank."""
        if self._keeps_gathered:
            for root in self._roots:
                root.set_reshard_after_backward(is_last)
        self._prefetch.begin()
        for held in self._held:
            held.computes_gradients = True
        try:
            yield
        finally:
            for held in self._held:
                held.computes_gradients = False

    def end_micro_batch(self, *, is_last: bool) -> None:
        """End the micro-batch; after the last of a step, free gathered blocks, so that only rows are left.

        Raises:
            UsageError: if gathered parameters were changed, see `HeldParameters.check_values`.
        """
        self._computes_step = False
        for held in self._held:
            held.compare_marks()
        if is_last:
            # Blocks gathered since the backward pass have the values from before the optimizers' steps.
            self.reshard()
            self.check_values()

    def discard_step(self) -> None:
        """Free gathered blocks, and forget the forward pass that no backward pass has followed."""
        self._computes_step = False
        for root in self._roots:
            # Torch 2.11 has no such method; there, what it remembers of the pass is replaced by the next one's. Before
            # the first forward pass, there is nothing to reset, and torch's own attributes are missing.
            if hasattr(root, "reset_iter_state") and knows_its_root(root):
                root.reset_iter_state()
        self.reshard()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context for forward passes, after which no block stays gathered. Collective.

        Raises:
            MismatchError: if ranks called other blocks.
        """
        self.compare_calls()
        self._evaluates = True
        try:
            yield
        finally:
            self._evaluates = False
            self.reshard()
        self.compare_calls()

    def compare_calls(self) -> None:
        """Check that all ranks called the same blocks; else ranks may have got each other's parameters. Collective.

        Raises:
            MismatchError: if not.
        """
        self._group.check_equal(
            "a checksum of the order in which forward() calls the blocks of wrap=... (where that depends on the data, "
            "say run.model(model, find_unused_parameters=True), which gathers the whole model at once)",
            self._calls,
        )

    def check_held(self) -> None:
        """Check that modules hold the divided parameters, see `HeldParameters.check_held`."""
        for held in self._held:
            held.check_held()

    def check_values(self) -> None:
        """Check that gathered parameters were not written to, see `HeldParameters.check_values`."""
        for held in self._held:
            held.check_values()

    def reshard(self) -> None:
        """Free gathered blocks, so that the script next reads the ranks' rows."""
        for block in self._blocks:
            block.reshard()

    def _note_call(self, number: int, block: FSDPModule, *_: object) -> None:
        self._calls = zlib.crc32(number.to_bytes(4, "little"), self._calls)
        self._prefetch.note_call(block)

    def _reshard_after_looking(self, blocks: Sequence[FSDPModule], *_: object) -> None:
        """Free blocks after a forward pass without a backward pass, so that the script next changes the ranks' rows."""
        if not (self._computes_step if torch.is_grad_enabled() else self._evaluates):
            for block in blocks:
                block.reshard()
