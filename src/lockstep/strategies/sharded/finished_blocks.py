"""When the backward pass of a block is over: its gradient is summed, and its gathered parameters are freed.

Torch finds that out by a function around all inputs of a block. Such a function adds the gradients of all reads of an
input within the block before they join those of other blocks: the memory of a decoder, which each block reads as keys
and as values, would get (V1 + K1) + (V0 + K0), and a model that is not divided gives ((V1 + K1) + V0) + K0: other bits.
Here nothing is put into the graph. Autograd computes nodes in the reverse of the order in which the forward pass made
them, so a gradient that arrives at a tensor says that all blocks called since the tensor was made are over:

    forward     x0 -> [block 0] -> x1 -> [block 1] -> x2 -> loss
    backward          the gradient of x2 is there: blocks called after it are over (none);   block 1 begins
                      the gradient of x1 is there: block 1 is over;                          block 0 begins
                      the gradient of x0 is there: block 0 is over

A block may return an input as it was. Its gradient arrives when the block is over, and does not gather it again. The
gradient of a leaf says less: autograd accumulates it before it goes on with earlier nodes. So the first block of a
reentrant checkpoint, whose inputs are leaves, is over with the checkpoint's own backward pass. Blocks that nothing here
ends are ended by torch after the whole backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import torch
from torch.distributed.fsdp import FSDPModule

from lockstep.torch_private import after_backward, in_backward, watch_block


class _Block:
    """How the backward pass of a block begins, given a gradient that is returned, and how the pass ends."""

    begin: Callable[[torch.Tensor], torch.Tensor]
    end: Callable[[], None]


class _Call:
    """A call of a block in a forward pass.

    Args:
        number: of the call.
        block: that is called.
    """

    def __init__(self, number: int, block: _Block) -> None:
        self.number: Final = number
        self.block: Final = block
        self.recomputes: Final = in_backward()
        self.begun = self.over = False  # its backward pass


class FinishedBlocks:
    """Begins and ends the backward passes of blocks, each as soon as all gradients within the block are computed."""

    def __init__(self) -> None:
        self._calls: Final[list[_Call]] = []  # in the order of the forward pass
        self._open: Final[list[_Call]] = []  # those whose backward pass has begun, and is not over

    def add(self, module: FSDPModule) -> None:
        """Watch a block with parameters, as `fully_shard` has made it."""
        block = _Block()
        block.begin, block.end = watch_block(
            module, partial(self._note_inputs, block), partial(self._note_outputs, block)
        )

    def forget(self) -> None:
        """Forget all calls, before a forward pass begins."""
        self._calls.clear()
        self._open.clear()

    def _note_inputs(self, block: _Block, inputs: Iterable[torch.Tensor]) -> None:
        call = _Call(len(self._calls), block)
        self._calls.append(call)
        for tensor in inputs:
            if not tensor.is_leaf:
                tensor.register_hook(partial(self._finish, call.number))

    def _note_outputs(self, block: _Block, outputs: Iterable[torch.Tensor]) -> None:
        call = next((call for call in reversed(self._calls) if call.block is block), _Call(-1, block))
        for tensor in outputs:
            tensor.register_hook(partial(self._begin, call, None if tensor.is_leaf else len(self._calls)))

    def _begin(self, call: _Call, first_after: int | None, gradient: torch.Tensor) -> torch.Tensor:
        """Begin the backward pass of ``call``, after those from number ``first_after`` on have ended."""
        if first_after is not None:
            self._finish(first_after)
        if call.over:
            return gradient
        if not call.begun:
            call.begun = True
            self._open.append(call)
            if call.recomputes:
                after_backward(partial(self._finish, call.number))
        return call.block.begin(gradient)

    def _finish(self, first: int, _gradient: object = None) -> None:
        """End the calls from number ``first`` on."""
        over = [call for call in self._open if call.number >= first]
        self._open[:] = [call for call in self._open if call.number < first]
        for call in sorted(over, key=lambda call: -call.number):
            call.over = True
            call.block.end()
