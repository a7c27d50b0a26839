"""Plain values as JSON, from which exactly equal values can be decoded: types, floats and order.

None, True, 7, "text"        themselves
0.1, nan                     {"float": "0x1.999999999999ap-4"}, {"float": "nan"}
np.float32(0.1)              {"numpy": ["float32", {"float": "0x1.99999a0000000p-4"}]}
b"..."                       {"bytes": "hex digits"}
[1, 2]                       [1, 2]
(1, 2)                       {"tuple": [1, 2]}
{"a": 1, 2: 3}               {"dict": [["a", 1], [2, 3]]}       also "OrderedDict", "Counter"
a tensor                     {"tensor": 5}                      the fifth of the manifest's tensors
"""

from __future__ import annotations

import importlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.errors import CheckpointError

#: A nested dict, list or tuple of tensors and plain values (None, bool, int, float, str, bytes); keys are str or int.
Tree = Any
#: A tree with names at its root, as saved by a run or a part of a run, and as loaded.
StateTree = dict[str, Any]
SavedTree = Mapping[str, Any]

# PyTorch's own state dicts hold these three: modules give an OrderedDict, MultiStepLR a Counter.
_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
# Numbers of NumPy, whose arithmetic differs from Python's.
_NUMPY = frozenset(
    {"bool", "float16", "float32", "float64", *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64))}
)
_TAG_OF = {kind: tag for tag, kind in _DICTS.items()}


def encode(tree: Tree, take: Callable[[object, str], int | None]) -> object:
    """``tree`` as JSON values.

    Args:
        tree: What to encode.
        take: Called for each leaf that is not plain, with its path such as ``"optimizer/state/0/step"``; returns the
            number of the tensor, or None if the leaf is no tensor.

    Raises:
        CheckpointError: for any other value, naming its path.
    """
    return _encode(tree, "", take)


def _encode(value: Any, path: str, take: Callable[[object, str], int | None]) -> object:
    if value is None or isinstance(value, bool):
        return value
    # First, since some NumPy numbers are Python numbers, too; without importing NumPy, which listing checkpoints does
    # not need.
    if type(value).__module__ == "numpy" and type(value).__name__ != "ndarray" and value.dtype.name in _NUMPY:
        return {"numpy": [value.dtype.name, _encode(value.item(), path, take)]}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if type(value) is list:
        return [_encode(item, f"{path}/{index}", take) for index, item in enumerate(value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"tuple": [_encode(item, f"{path}/{index}", take) for index, item in enumerate(value)]}
    if type(value) in _TAG_OF:
        for key in value:
            if type(key) not in (str, int):
                raise CheckpointError(
                    f"state at {_shown(path)} has the key {key!r} ({type(key).__name__}), which cannot be saved: "
                    "use str or int keys"
                )
        pairs = [[key, _encode(item, f"{path}/{key}", take)] for key, item in value.items()]
        return {_TAG_OF[type(value)]: pairs}
    number = take(value, path.removeprefix("/"))
    if number is None:
        raise CheckpointError(
            f"state at {_shown(path)} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: "
            "let its state_dict() give tensors, None, bool, int, float, str, bytes, and lists, tuples and dicts of "
            "these (an array as torch.from_numpy(array))"
        )
    return {"tensor": number}


def _shown(path: str) -> str:
    return repr(path.removeprefix("/")) if path else "its root"


def decode(value: object, tensors: Sequence[object]) -> Tree:
    """The tree that `encode` has encoded, with ``tensors`` in their places.

    Raises:
        ValueError: if ``value`` is no result of `encode`.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, inner),) = value.items()
    if tag == "float":
        return float.fromhex(inner)
    if tag == "numpy":
        name, number = inner
        if name not in _NUMPY:
            raise ValueError(f"unknown kind of number {name!r}")
        return importlib.import_module("numpy").dtype(name).type(decode(number, tensors))
    if tag == "bytes":
        return bytes.fromhex(inner)
    if tag == "tuple":
        return tuple(decode(item, tensors) for item in inner)
    if tag == "tensor":
        if not (type(inner) is int and 0 <= inner < len(tensors)):
            raise ValueError(f"there is no tensor {inner!r} among {len(tensors)}")
        return tensors[inner]
    if tag in _DICTS:
        return _DICTS[tag]({key: decode(item, tensors) for key, item in inner})
    raise ValueError(f"unknown kind of value {tag!r}")
