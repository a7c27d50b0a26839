"""The blocks of `fully_shard`: when each of them is gathered, and from when on its rows are all that a rank holds.

a block is called      gathered, computed, freed; noted, for all ranks must call the same ones
its backward pass      gathered again, computed, freed
anything else          `reshard` has freed what was still gathered: a script reads and changes the rows
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
from lockstep.strategies.sharded.prefetch import Prefetch
from lockstep.torch_private import knows_its_root


class ShardedBlocks:
    """The blocks of all models, each of which is a block itself.

    Args:
        group: all ranks.
        prefetch: which blocks are gathered ahead.
        strategy: its name.
        keeps_gathered: whether blocks stay gathered until the step's last backward pass.
    """

    def __init__(self, group: Group, prefetch: Prefetch, strategy: str, *, keeps_gathered: bool) -> None:
        self._group: Final = group
        self._prefetch: Final = prefetch
        self._strategy: Final = strategy
        self._keeps_gathered: Final = keeps_gathered
        self._blocks: Final[list[FSDPModule]] = []
        self._roots: Final[list[FSDPModule]] = []
        self._held: Final[list[HeldParameters]] = []
        self._calls = 0  # a checksum of which blocks were called, in their order
        self._evaluates = self._computes_step = False

    def add(self, model: nn.Module, module: nn.Module, own: Collection[nn.Parameter]) -> None:
        """A ``module`` of ``model`` after `fully_shard`; ``own`` are its parameters, and of no block inside it."""
        block = cast(FSDPModule, module)
        self._blocks.append(block)
        self._held.append(HeldParameters(model, module, own, self._strategy))
        module.register_forward_pre_hook(partial(self._note_call, len(self._blocks), block), prepend=True)

    def add_model(self, model: nn.Module, blocks: Sequence[FSDPModule]) -> None:
        """``model``, after its ``blocks``, itself among them."""
        self._roots.append(cast(FSDPModule, model))
        if callable(getattr(model, "generate", None)):
            # Models of transformers use parameters in it outside of forward(): an encoder is called by itself.
            register_fsdp_forward_method(model, "generate")
        else:
            model.register_forward_hook(partial(self._reshard_after_looking, blocks))

    def begin_micro_batch(self, *, compares: bool) -> None:
        """A forward pass comes that a backward pass will follow; it ``compares`` what is gathered around itself."""
        self._computes_step = True
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
        """The micro-batch is over; after the last one of a step, the rows are what counts.

        Raises:
            UsageError: if what was gathered was changed, see `HeldParameters.check_values`.
        """
        self._computes_step = False
        for held in self._held:
            held.compare_marks()
        if is_last:
            # What a forward pass has gathered since the backward pass is as it was before the optimizers' steps.
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
        """Check that all ranks called the same blocks; else they may have got each other's parameters. Collective.

        Raises:
            MismatchError: if some did not.
        """
        self._group.check_equal(
            "a checksum of the order in which forward() calls the blocks of wrap=... (where that depends on the data, "
            "say run.model(model, find_unused_parameters=True), which gathers the whole model at once)",
            self._calls,
        )

    def check_held(self) -> None:
        """Check that modules hold what was divided, see `HeldParameters.check_held`."""
        for held in self._held:
            held.check_held()

    def check_values(self) -> None:
        """Check that nothing was written to what is dropped, see `HeldParameters.check_values`."""
        for held in self._held:
            held.check_values()

    def reshard(self) -> None:
        """Free gathered blocks, so that what is read next are the ranks' rows."""
        for block in self._blocks:
            block.reshard()

    def _note_call(self, number: int, block: FSDPModule, *_: object) -> None:
        self._calls = zlib.crc32(number.to_bytes(4, "little"), self._calls)
        self._prefetch.note_call(block)

    def _reshard_after_looking(self, blocks: Sequence[FSDPModule], *_: object) -> None:
        """After a forward pass that no backward pass follows: what the script changes next are the ranks' rows."""
        if not (self._computes_step if torch.is_grad_enabled() else self._evaluates):
            for block in blocks:
                block.reshard()
