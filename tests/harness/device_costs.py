"""What a piece of code asks of a device, counted on a machine that has none.

Tensors of `DEVICE` hold nothing and lie on no CPU, so the code takes the ways that it takes on a GPU. `Costs` sees each
operation, and counts the kernels that torch would launch for it on a GPU and whether the host would wait for its
result. With tensors of the CPU it counts the operations of a whole step.
"""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
# These return views or memory, or ask for what the host knows.
_NO_KERNEL = frozenset(
    """view _unsafe_view view_as_real reshape _reshape_alias as_strided alias detach lift_fresh expand permute transpose
    t slice select split split_with_sizes unbind unsqueeze squeeze empty empty_like empty_strided new_empty
    new_empty_strided _local_scalar_dense device diagonal chunk resize_ set_ record_stream""".split()  # noqa: SIM905
)
_COPIES = ("copy_", "_to_copy", "_foreach_copy_")
_WAITS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero")
#: One launch of a foreach kernel takes at least this many tensors, and chunks of `_CHUNK` elements; of a `cat`, inputs.
_TENSORS, _CHUNKS, _CHUNK, _INPUTS = 64, 320, 1 << 16, 128


class Costs(TorchDispatchMode):
    """While it is entered: the ``launches`` of kernels and the ``waits`` of the host, by the names of operations."""

    def __init__(self):
        super().__init__()
        self.launched, self.waited = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::").removeprefix("prim::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        moves = _devices(tensors) | _devices([torch.empty(1, device=kwargs["device"])] if kwargs.get("device") else [])
        if len({t.device.type for t in tensors if t.dim() or name == "cat"}) > 1 and name not in _COPIES:
            raise RuntimeError(f"{name}: a GPU computes with no tensor of the CPU but a number, not with an empty one")
        waits = name in _WAITS or (len(moves) > 1 and name in _COPIES and not _is_free(args, kwargs))
        if waits:
            self.waited.append(name)
        if tensors and tensors[0].is_meta and name in ("_local_scalar_dense", "equal"):
            return True  # there is no value to give
        if name == "_to_copy" and tensors[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            return torch.zeros(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        if name == "_foreach_copy_" and tensors[0].is_cpu and tensors[-1].is_meta:
            return None  # the launches are those of the copying engines
        result = func(*args, **kwargs)
        if func.namespace == "profiler":  # marks of a trace
            return result
        self.launched += [name] * _launches(name, tensors, args)
        return result

    @property
    def launches(self):
        return len(self.launched)

    @property
    def waits(self):
        return len(self.waited)


def _devices(tensors):
    """Of those that hold anything, and are no numbers that a kernel takes as an argument."""
    return {t.device.type for t in tensors if t.numel()}


def _is_free(args, kwargs):
    """Whether a copy between devices does not wait."""
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))


def _launches(name, tensors, args):
    if name in _NO_KERNEL:
        return 0
    if name in ("cat", "stack"):
        return math.ceil(len(tensors) / _INPUTS)
    if not name.startswith("_foreach_"):
        return 1
    lists = [part for part in args if isinstance(part, list | tuple) and part and isinstance(part[0], torch.Tensor)]
    first = lists[0]
    alike = {(t.dtype, t.device) for each in lists for t in each}
    same_places = all(len({(t.shape, t.stride()) for t in parts}) == 1 for parts in zip(*lists, strict=True))
    dense = all(t.is_contiguous() for t in first)
    if len(alike) > 1 or not same_places or not dense:
        return len(first)
    chunks = sum(math.ceil(t.numel() / _CHUNK) for t in first)
    return max(math.ceil(len(first) / _TENSORS), math.ceil(chunks / _CHUNKS)) * (2 if "norm" in name else 1)
