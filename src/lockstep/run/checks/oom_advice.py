"""Free memory, and advice when a GPU's memory is full: two settings that would fit, by estimate.

    peak  =  what stays                             +  what grows with the micro-batch
             parameters, gradients, optimizer          activations: halved by half of it, or by 16 bits

No setting is changed automatically.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lockstep.memory_use import MemoryUse, host_memory

_GIB = 1 << 30
# The part of the device's memory that fragments and libraries leave to use.
_USABLE = 0.92


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The peak use of a rank's GPU memory, in bytes."""

    peak: int  #: allocated at most, including the failed allocation
    stays: int  #: parameters, their gradients, the optimizer's state
    total: int  #: of the device
    micro_batch: int
    global_batch: int
    precision: str

    def at(self, micro_batch: int, *, halved: bool) -> int:
        """Expected peak with this micro-batch, and with activations in half as many bits."""
        grows = max(0, self.peak - self.stays) * micro_batch / self.micro_batch
        return int(self.stays + grows * (0.5 if halved else 1.0))

    def fits(self, micro_batch: int, *, halved: bool) -> bool:
        """Whether that is expected to fit."""
        return self.at(micro_batch, halved=halved) <= self.total * _USABLE

    def largest(self, *, halved: bool) -> int | None:
        """The largest micro-batch that is expected to fit, from the present one down by halves."""
        size = self.micro_batch if halved else self.micro_batch // 2
        while size and not self.fits(size, halved=halved):
            size //= 2
        return size or None


def advice(peak: MemoryPeak) -> list[str]:
    """Lines of advice for the user. No setting is changed automatically, which would alter the bits of the result."""
    ways = []
    if (size := peak.largest(halved=False)) is not None:
        ways.append(f"micro_batch={size} ({peak.at(size, halved=False) / _GIB:.1f} GiB)")
    if peak.precision == "fp32" and (size := peak.largest(halved=True)) is not None:
        smaller = f" with micro_batch={size}" if size != peak.micro_batch else ""
        ways.append(f"--precision bf16{smaller} ({peak.at(size, halved=True) / _GIB:.1f} GiB)")
    lines = [
        f"peak {peak.peak / _GIB:.1f} GiB of {peak.total / _GIB:.1f} GiB with micro_batch={peak.micro_batch}, of which "
        f"{peak.stays / _GIB:.1f} GiB are parameters, gradients and the optimizer's state",
    ]
    if ways:
        lines.append(f"would fit, by estimate: {', or '.join(ways)}; global_batch stays {peak.global_batch}")
    else:
        lines.append("no micro_batch would fit: the model itself is too large for this device")
    return lines


def free_bytes(device: torch.device, ranks: int) -> int:
    """Memory of ``device`` that this rank may still use, where ``ranks`` share this machine's; 0 if nobody says."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return (host_memory().host_free or 0) // ranks


def gpu_memory(device: torch.device) -> MemoryUse:
    """This process's use of host memory, and its tensors' use of the GPU ``device``. Does not wait for the GPU.

    Memory that torch has reserved and no tensor takes counts as free.
    """
    host = host_memory()
    try:
        free, _ = torch.cuda.mem_get_info(device)
        taken, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        peak = torch.cuda.max_memory_allocated(device)
    except RuntimeError:  # an error of the GPU, which the main thread will meet
        return host
    return replace(host, device=taken, device_peak=peak, device_free=int(free) + reserved - taken)


def wanted_bytes(error: BaseException) -> int:
    """The bytes of the failed allocation, from torch's text ``Tried to allocate 2.00 GiB``; 0 if not in the text."""
    parts = str(error).partition("Tried to allocate ")[2].split()
    units = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    try:
        return int(float(parts[0]) * units[parts[1].rstrip(".")])
    except (IndexError, KeyError, ValueError):
        return 0


def staying_bytes(tensors: list[torch.Tensor], gradients: list[torch.Tensor]) -> int:
    """The bytes of ``tensors``, and of gradients for ``gradients``."""
    return sum(t.numel() * t.element_size() for t in [*tensors, *gradients])


def add_memory_advice(error: BaseException, peak: MemoryPeak) -> None:
    """Add the advice to ``error``, unless it has notes already."""
    if not getattr(error, "__notes__", None):
        for line in advice(peak):
            error.add_note(line)
