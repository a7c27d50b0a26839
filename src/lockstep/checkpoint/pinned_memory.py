"""Memory of the host to which GPUs copy without a wait for each tensor."""

from __future__ import annotations

import weakref

import torch

from lockstep.torch_private import foreach_copy_


def lock_pages(memory: torch.Tensor) -> bool:
    """Keep the pages of ``memory``, contiguous bytes on the CPU, where they are until the tensor is gone.

    Memory that torch itself locks (``pin_memory=True``) is rounded up to a power of two: 8 GiB for a state of 5.

    Returns:
        Whether CUDA has taken it. Else copies to it are right, too, and wait one by one.
    """
    cuda, address = torch.cuda.cudart(), memory.data_ptr()
    if not memory.numel() or int(cuda.cudaHostRegister(address, memory.numel(), 0)):
        return False
    # A process that ends gives all back by itself, and CUDA may have ended before.
    weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False
    return True


def copy_to_host(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy ``sources`` to ``places`` on the CPU: on return all are there, after one wait for each GPU."""
    if not sources:
        return
    with torch.no_grad():
        foreach_copy_(places, sources, non_blocking=True)
    for device in {source.device for source in sources if source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
