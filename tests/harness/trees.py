"""Trees of states as hypothesis makes them, and what it means that two are the same."""

from collections import Counter, OrderedDict

import torch
from hypothesis import strategies as st

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8,
    torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
KEYS = st.one_of(st.text(max_size=4), st.integers(-3, 2**70))


@st.composite
def tensors(draw):
    """Any bits, any of these shapes: 0-dim, empty, transposed, strided, channels last, tied to another's storage."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    seed = draw(st.integers(0, 2**31))
    count = 2 * int(torch.Size([n + 1 for n in shape]).numel()) * 16
    noise = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8,
                          generator=torch.Generator().manual_seed(seed))  # fmt: skip
    flat = noise.view(dtype)
    return (
        flat.as_strided(shape, draw(st.permutations([1, 2, 3, 4]))[: len(shape)])
        if draw(st.booleans())
        else flat[: torch.Size(shape).numel()].view(shape)
    )


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5))
TREES = st.recursive(
    PLAIN | tensors(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=2).map(OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=2).map(Counter),
    ),
    max_leaves=12,
)


def same(a, b):
    """The same types, the same keys in the same order, the same bits."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape) and bits(a) == bits(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def bits(tensor):
    # An empty tensor may have strides that `view` does not accept.
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()
