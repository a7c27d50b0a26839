"""The words after ``--strategy``, ``name:option=value,option=value``, as far as they can be checked without torch.

What a value means is documented in the strategy. Here are the names, so that a misspelt one is reported before any rank
starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lockstep.option_words import split_options

_FSDP = ("wrap", "mixed", "reshard", "ignored_modules", "prefetch", "offload", "checkpoint_activations")
#: The strategies, each with the names of its options; a test compares them with the fields of its `Options`.
STRATEGY_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "none": (),
    "dp": ("devices",),
    "ddp": ("compress", "rank", "start"),
    "zero": ("stage",),
    "fsdp": _FSDP,
    "hsdp": ("shard", *_FSDP),
    "local-sgd": ("period", "warmup", "node_period", "moments"),
    "diloco": ("period", "outer_lr", "outer_momentum", "fragments", "overlap", "mix", "wire"),
    "parameter-server": ("servers", "mode", "staleness"),
    "hybrid": ("servers", "served"),
    "pipeline": ("stages", "schedule", "chunks", "cut", "sample"),
    "auto": (),
}


def split(spec: str) -> tuple[str, dict[str, str]]:
    """The name and the options of ``spec``, as they were written; an option alone means true.

    Raises:
        SettingError: if there is no such strategy or option (with the nearest one), an option is named twice, or there
            is none between two commas.
    """
    return split_options("strategy", spec, STRATEGY_WORDS)
