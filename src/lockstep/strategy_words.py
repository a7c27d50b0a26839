"""The words after ``--strategy``, ``name:option=value,option=value``, as far as they can be checked without torch.

What a value means is documented in the strategy. Here are the names, so that a misspelt one is reported before any rank
starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lockstep.option_words import split_options

_FSDP = ("wrap", "mixed", "reshard", "ignored_modules", "prefetch", "offload", "checkpoint_activations", "tensor")
#: The strategies, each with the names of its options; a test compares them with the fields of its `Options`.
STRATEGY_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "none": (),
    "dp": ("devices",),
    "ddp": ("compress", "rank", "start"),
    "zero": ("stage",),
    "fsdp": _FSDP,
    "hsdp": (*_FSDP, "shard"),
    "local-sgd": ("period", "warmup", "node_period", "moments"),
    "diloco": ("period", "outer_lr", "outer_momentum", "fragments", "overlap", "mix", "wire"),
    "parameter-server": ("servers", "mode", "staleness"),
    "hybrid": ("servers", "served"),
    "pipeline": ("stages", "schedule", "chunks", "cut", "sample"),
    "auto": (),
}
#: Those of which each gives the bits of one rank, without options but those that leave bits alone.
SAME_BITS: Final = frozenset(("none", "ddp", "zero", "fsdp", "hsdp", "parameter-server", "hybrid", "pipeline"))
#: What other libraries call them, in small letters and with hyphens.
_ELSEWHERE: Final[Mapping[str, str]] = {
    **dict.fromkeys(("single-device", "single"), "none"),
    **dict.fromkeys(("data-parallel", "dataparallel"), "dp"),
    **dict.fromkeys(("distributed-data-parallel", "distributeddataparallel", "ddp-spawn", "ddp-notebook"), "ddp"),
    **dict.fromkeys(("ddp-find-unused-parameters-true", "horovod", "allreduce", "multi-gpu"), "ddp"),
    **dict.fromkeys(("zero1", "zero-1", "deepspeed-stage-1", "shard-optimizer"), "zero"),
    **dict.fromkeys(("deepspeed", "zero2", "zero-2", "deepspeed-stage-2", "shard-grad-op"), "zero:stage=2"),
    **dict.fromkeys(("zero3", "zero-3", "deepspeed-stage-3", "full-shard", "fully-shard", "fsdp2"), "fsdp"),
    **dict.fromkeys(("hybrid-shard", "hybrid-sharded"), "hsdp"),
    **dict.fromkeys(("pp", "gpipe", "1f1b"), "pipeline"),
}


def split(spec: str) -> tuple[str, dict[str, str]]:
    """The name and the options of ``spec``, as they were written; an option alone means true.

    Raises:
        SettingError: if there is no such strategy or option (with the nearest one), an option is named twice, or there
            is none between two commas.
    """
    return split_options("strategy", spec, STRATEGY_WORDS, elsewhere=_ELSEWHERE)
