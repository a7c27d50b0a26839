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

The gradient of a leaf says less: autograd accumulates it before it goes on with earlier nodes. So the first block of a
reentrant checkpoint, whose inputs are leaves, is over with the checkpoint's own backward pass. Blocks that nothing here
ends are ended by torch after the whole backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lockstep.nested import leaves
from lockstep.torch_private import after_backward, ends_backward, in_backward


class _Call:
    """A call of a block in a forward pass.

    Args:
        number: how many calls before this one are not over.
        end: ends the backward pass of the block.
    """

    def __init__(self, number: int, end: Callable[[], None]) -> None:
        self.number: Final = number
        self.end: Final = end
        self.recomputes: Final = in_backward()
        self.begun = False  # whether its backward pass has: not where a recomputed block only gives tensors to others


class FinishedBlocks:
    """Ends the backward passes of blocks, each as soon as all gradients within the block are computed."""

    def __init__(self) -> None:
        self._calls: Final[list[_Call]] = []  # that are not over, in the order of the forward pass

    def add(self, module: nn.Module, block: FSDPModule) -> None:
        """Watch ``module``, of which `fully_shard` has made a ``block`` with parameters."""
        end = ends_backward(block, self._note_inputs)
        # Before the hooks of torch, which gather the block again for its backward pass: that may be a block just ended.
        module.register_forward_hook(partial(self._note_outputs, end), prepend=True)

    def forget(self) -> None:
        """Forget calls that no backward pass has reached."""
        self._calls.clear()

    def _note_inputs(self, end: Callable[[], None], inputs: object) -> None:
        if torch.is_grad_enabled():
            call = _Call(len(self._calls), end)
            self._calls.append(call)
            _watch(inputs, partial(self._finish, call.number))

    def _note_outputs(self, end: Callable[[], None], _module: nn.Module, _inputs: object, outputs: object) -> None:
        if torch.is_grad_enabled():
            call = next((call for call in reversed(self._calls) if call.end is end), None)
            if call is not None:
                _watch(outputs, partial(self._begin, call, len(self._calls)))

    def _begin(self, call: _Call, first_after: int) -> None:
        self._finish(first_after)
        if call.recomputes and not call.begun:
            after_backward(partial(self._finish, call.number))
        call.begun = True

    def _finish(self, first: int) -> None:
        """End the calls from number ``first`` on."""
        over = self._calls[first:]
        del self._calls[first:]
        for call in reversed(over):
            if call.begun:
                call.end()


def _watch(values: object, arrived: Callable[[], None]) -> None:
    """Let ``arrived`` be called as soon as the gradient of a tensor in ``values`` is there, except for leaves."""
    for _, value in leaves(values):
        if isinstance(value, torch.Tensor) and not value.is_leaf:
            value.register_hook(lambda _gradient: arrived())
