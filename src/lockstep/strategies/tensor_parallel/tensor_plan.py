"""The division of a model's layers within a tensor group, read from a plan, without touching the model.

    plan                                  layer                     weight, of shape (out, in)      bias
    "layers.*.up": "colwise"              layers.0.up               rows: (out / n, in)             divided
    "layers.*.down": "rowwise"            layers.0.down             columns: (out, in / n)          whole
    ColwiseParallel() of torch            as "colwise"

The words are those of transformers, whose models bring a plan of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lockstep.collectives import StoredTensor, TensorShard
from lockstep.errors import UsageError
from lockstep.torch_private import own_parameters

COLWISE: Final = "colwise"
COLWISE_GATHERED: Final = "colwise_gather_output"
ROWWISE: Final = "rowwise"
ROWWISE_SPLIT: Final = "rowwise_split_input"
EMBEDDING_ROWWISE: Final = "embedding_rowwise"
EMBEDDING_COLWISE: Final = "embedding_colwise"
SUMMED: Final = "replicated_with_grad_allreduce"

#: Which dimension of which parameter each style divides.
_DIVIDES: Final[Mapping[str, Mapping[str, int]]] = {
    COLWISE: {"weight": 0, "bias": 0},
    COLWISE_GATHERED: {"weight": 0, "bias": 0},
    ROWWISE: {"weight": 1},
    ROWWISE_SPLIT: {"weight": 1},
    EMBEDDING_ROWWISE: {"weight": 0},
    EMBEDDING_COLWISE: {"weight": 1},
    SUMMED: {},
}
#: What a style is called for an embedding; and names that transformers gave some of them before.
_OF_EMBEDDINGS: Final = {ROWWISE: EMBEDDING_ROWWISE, COLWISE_GATHERED: EMBEDDING_COLWISE}
_OLD_NAMES: Final = {"colwise_rep": COLWISE_GATHERED, "rowwise_rep": ROWWISE_SPLIT}
#: They read the weights of layers inside of them without calling these.
_READS_WEIGHTS: Final = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
#: What the styles of torch are called here, by their class and by the layouts of their input and output.
_OF_TORCH: Final[Mapping[tuple[type, Placement, Placement], str]] = {
    (ColwiseParallel, Replicate(), Shard(-1)): COLWISE,
    (ColwiseParallel, Replicate(), Replicate()): COLWISE_GATHERED,
    (RowwiseParallel, Shard(-1), Replicate()): ROWWISE,
    (RowwiseParallel, Replicate(), Replicate()): ROWWISE_SPLIT,
}
_EXAMPLE: Final = (
    'run.model(net, tensor_plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"}), with the names of your layers'
)


@dataclass(frozen=True, slots=True)
class TensorDivision:
    """A rank's part of a tensor that is divided along one dimension into parts of equal length."""

    dim: int
    start: int  #: of the part, along that dimension
    length: int  #: of the part
    shape: tuple[int, ...]  #: of the whole

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor, with memory of its own; of one in a file, a tensor that reads no more of it."""
        if not isinstance(whole, StoredTensor):
            return whole.narrow(self.dim, self.start, self.length).clone(memory_format=torch.contiguous_format)

        def read(start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
            return whole.box(self._outside(start), shape)

        return StoredTensor(self.local_shape, whole.dtype, read)

    def shard(self, part: torch.Tensor | TensorShard) -> TensorShard:
        """The shard of the whole tensor that is the part, or a box of the part."""
        if isinstance(part, torch.Tensor):
            return TensorShard(part.detach(), self._outside((0,) * part.dim()), self.shape, part.dtype)
        if part.tensor is None:
            return TensorShard.absent(self.shape, part.dtype)
        return TensorShard(part.tensor, self._outside(part.start), self.shape, part.dtype)

    def _outside(self, start: tuple[int, ...]) -> tuple[int, ...]:
        """Where in the whole the element ``start`` of the part is."""
        return (*start[: self.dim], start[self.dim] + self.start, *start[self.dim + 1 :])


def styles_of(model: nn.Module, plan: Mapping[str, object] | None) -> dict[str, str]:
    """The layers of ``model`` that a plan names, each with its style, in the model's order.

    Args:
        model: asked for a plan of its own if ``plan`` is None: ``tensor_parallel_plan``, or ``tp_plan`` as models of
            transformers have it, whose patterns need not fit a layer.
        plan: styles by patterns, compared name by name between the dots, as `parallelize_module` does; a style is a
            word of transformers or an object of torch. An empty one divides nothing.

    Raises:
        UsageError: if there is no plan, or one that cannot be followed, by the name of what is in the way.
    """
    if plan is not None and not plan:
        return {}
    given = plan
    if given is None:
        given = getattr(model, "tensor_parallel_plan", None) or getattr(model, "tp_plan", None)
    if not isinstance(given, Mapping) or not given:
        raise UsageError(
            f"tensor=... divides the layers that a plan names, and {type(model).__name__} has none: say {_EXAMPLE}; it "
            f"has {', '.join(_divisible(model)[:6]) or 'no nn.Linear and no nn.Embedding'}. With tensor_plan={{}}, "
            "each rank of a tensor group computes all of it"
        )
    found: dict[str, str] = {}
    modules = dict(model.named_modules())
    for pattern, style in given.items():
        names = [name for name in modules if name and _fits(name, pattern)]
        if not names and plan is not None:
            raise UsageError(
                f"tensor_plan: {type(model).__name__} has no layer {pattern!r}; it has "
                f"{', '.join(_divisible(model)[:6])}. A * stands for one name between dots"
            )
        # A module that computes with divided activations does so with all that is inside of it.
        named = [(name, _word(name, style, modules[name])) for name in names]
        named += [(inner, SUMMED) for name, word in named if word == SUMMED for inner in _inside(name, modules[name])]
        for name, word in named:
            if found.setdefault(name, word) != word:
                raise UsageError(f"tensor_plan: it names {name} as {found[name]} and as {word}; name it once")
    if not any(_DIVIDES[style] for style in found.values()):
        raise UsageError(f"tensor_plan: it divides no layer of {type(model).__name__}: say {_EXAMPLE}")
    inside = {inner for m in modules.values() if isinstance(m, _READS_WEIGHTS) for inner in m.modules()}
    for name, style in found.items():
        if _DIVIDES[style]:
            _check_layer(name, style, modules[name], read_around=modules[name] in inside)
    return {name: found[name] for name in modules if name in found}


def divisions_of(model: nn.Module, styles: Mapping[str, str], rank: int, ranks: int) -> dict[str, TensorDivision]:
    """What the rank of that number in a tensor group of so many holds of the tensors that are divided, by their names.

    Raises:
        UsageError: for a size that is no multiple of ``ranks``, or a tensor that modules share and only some of them
            divide alike.
    """
    by_name: dict[str, TensorDivision] = {}
    for layer, style in styles.items():
        for own_name, dim in _DIVIDES[style].items():
            tensor = getattr(model.get_submodule(layer), own_name, None)
            if tensor is not None:
                name = f"{layer}.{own_name}"
                length, rest = divmod(tensor.shape[dim], ranks)
                if rest:
                    raise UsageError(
                        f"tensor_plan: {name} of shape {tuple(tensor.shape)} cannot be divided {style} among {ranks} "
                        f"ranks, for {tensor.shape[dim]} is no multiple of {ranks}: make it one, or leave {layer} out"
                    )
                by_name[name] = TensorDivision(dim, rank * length, length, tuple(tensor.shape))
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    for names in names_of.values():
        if len({by_name.get(name) for name in names}) > 1:
            raise UsageError(
                f"tensor_plan: {' and '.join(names)} are one tensor, and the plan does not divide them alike: name "
                "both layers, such as the embedding as embedding_rowwise and the head as colwise_gather_output"
            )
    return by_name


def _divisible(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]


def _inside(name: str, module: nn.Module) -> list[str]:
    """The modules with parameters of their own inside of the one of that name."""
    return [n for n, inner in module.named_modules(prefix=name) if inner is not module and own_parameters(inner)]


def _fits(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _word(name: str, given: object, module: nn.Module) -> str:
    """The style that was given for the layer ``name``, as a word.

    Raises:
        UsageError: for one that is not known.
    """
    word: object = given
    if isinstance(given, ParallelStyle):
        layouts: tuple[Any, Any] = (getattr(given, "input_layouts", ()), getattr(given, "output_layouts", ()))
        key = (type(given), *(layout[0] if len(layout) == 1 else None for layout in layouts))
        word = _OF_TORCH.get(key) if getattr(given, "use_local_output", False) else None  # type: ignore[arg-type]
    word = _OLD_NAMES.get(str(word), str(word))
    if isinstance(module, nn.Embedding):
        word = _OF_EMBEDDINGS.get(word, word)
    if word not in _DIVIDES:
        raise UsageError(
            f"tensor_plan: {name} as {given!r}, which is not known here; it can be {', '.join(_DIVIDES)}, or torch's "
            "ColwiseParallel and RowwiseParallel with inputs and outputs that are whole or divided in the last "
            "dimension. What no plan names stays whole"
        )
    return word


def _check_layer(name: str, style: str, module: nn.Module, *, read_around: bool) -> None:
    """Check that the layer can be divided so.

    Raises:
        UsageError: if it cannot.
    """
    kind = nn.Embedding if style in (EMBEDDING_ROWWISE, EMBEDDING_COLWISE) else nn.Linear
    if read_around:
        raise UsageError(
            f"tensor_plan: {name} lies in a module of torch that reads its weight without calling it; write the "
            "attention with layers of its own for queries, keys and values, or leave it out"
        )
    if (
        not isinstance(module, kind)
        or type(module).forward is not kind.forward
        or "weight" not in own_parameters(module)
    ):
        raise UsageError(
            f"tensor_plan: {name} as {style}, and it is a {type(module).__name__}: that is for nn.{kind.__name__}, "
            "with its own forward pass and a weight that is a parameter"
        )
    if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
        raise UsageError(
            f"tensor_plan: {name} has scale_grad_by_freq, for which a rank would need the rows of others; leave it "
            "out, or leave the layer out of the plan"
        )
