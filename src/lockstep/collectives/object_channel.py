"""Transport of objects with tensors, from one rank to another or to all, for the outputs of a pipeline's stages.

("logits", tensor of (32, 10))  ──►  pickled: the object, with tensor 0's type and shape in its place
                                     bytes: tensor 0, from device to device
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from lockstep.collectives.group import Group, translating_peer_errors

Header = tuple[bytes, list[tuple[torch.Size, torch.dtype]]]


class ObjectChannel:
    """A connection between the ranks of ``group``, independent of other connections. The constructor is collective.

    Tensors arrive on the group's device, contiguous, new, and without gradient history.
    """

    def __init__(self, group: Group) -> None:
        self._rank: Final = group.rank
        self._device: Final = group.device
        self._transport_device: Final = torch.device("cpu") if group.over_cpu else group.device  # whose memory is sent
        self._tensor_group: Final = group.new_process_group(backend=group.backend)
        self._header_group: Final = group.new_process_group(backend="gloo")

    def send(self, value: object, to: int) -> None:
        """Send ``value``, any picklable object, to the rank ``to``, which must call `receive`."""
        header, tensors = split_object(value, self._transport_device)
        with translating_peer_errors("the hand-over between stages"):
            dist.send_object_list([header], group=self._header_group, group_dst=to)
            for tensor in tensors:
                dist.send(as_bytes(tensor), group=self._tensor_group, group_dst=to)

    def receive(self, source: int) -> Any:
        """Wait for the object that the rank ``source`` sends, and return it."""
        headers: list[Any] = [None]
        with translating_peer_errors("the hand-over between stages"):
            dist.recv_object_list(headers, group=self._header_group, group_src=source)
            return self._rebuild(headers[0], lambda t: dist.recv(t, group=self._tensor_group, group_src=source))

    def broadcast(self, value: object, source: int) -> object:
        """The ``value`` of the rank ``source``, on every rank; on ``source`` the object itself. Collective."""
        is_source = self._rank == source
        header, tensors = split_object(value, self._transport_device) if is_source else (None, [])
        headers: list[Any] = [header]
        with translating_peer_errors("the hand-over between stages"):
            dist.broadcast_object_list(headers, group=self._header_group, group_src=source)
            if not is_source:
                return self._rebuild(
                    headers[0], lambda t: dist.broadcast(t, group=self._tensor_group, group_src=source)
                )
            for tensor in tensors:
                dist.broadcast(as_bytes(tensor), group=self._tensor_group, group_src=source)
        return value

    def _rebuild(self, header: Header, fill: Callable[[torch.Tensor], object]) -> object:
        return rebuild_object(header, fill, self._transport_device, self._device)


def split_object(value: object, device: torch.device) -> tuple[Header, list[torch.Tensor]]:
    """``value`` without its tensors, and the non-empty tensors, contiguous in the memory of ``device``."""
    pickled, tensors = io.BytesIO(), list[torch.Tensor]()
    _Pickler(pickled, tensors).dump(value)
    shapes = [(t.shape, t.dtype) for t in tensors]
    return (pickled.getvalue(), shapes), [t.to(device).contiguous() for t in tensors if t.numel()]


def rebuild_object(
    header: Header, fill: Callable[[torch.Tensor], object], transport_device: torch.device, device: torch.device
) -> object:
    """The object that `split_object` has taken apart, with new tensors on ``device``.

    Args:
        header: of `split_object`.
        fill: receives the bytes of the next tensor into the given memory.
        transport_device: the device of this memory.
        device: of the returned tensors.
    """
    pickled, shapes = header
    tensors = [torch.empty(shape, dtype=dtype, device=transport_device) for shape, dtype in shapes]
    for tensor in tensors:
        if tensor.numel():
            fill(as_bytes(tensor))
    return _Unpickler(io.BytesIO(pickled), [t.to(device) for t in tensors]).load()


class _Pickler(pickle.Pickler):
    """A pickler that writes a number in place of a tensor."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors: Final = tensors

    def persistent_id(self, value: object) -> int | None:
        """The number of a tensor; None for any other value."""
        if not isinstance(value, torch.Tensor):
            return None
        self._tensors.append(value.detach())
        return len(self._tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors: Final = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        """The tensor with this number."""
        return self._tensors[number]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of ``tensor`` as bytes, which every transport takes."""
    return tensor.view(-1).view(torch.uint8)
