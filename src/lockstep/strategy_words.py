"""The words after ``--strategy``, ``name:option=value,option=value``, as far as they can be checked without torch.

What a value means is documented in the strategy. Here are the names, so that a misspelt one is reported before any rank
starts.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Final

from lockstep.errors import SettingError

_FSDP = ("wrap", "mixed", "reshard", "ignored_modules", "prefetch", "offload", "checkpoint_activations")
#: The strategies, each with the names of its options; a test compares them with the fields of its `Options`.
STRATEGY_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "none": (),
    "dp": ("devices",),
    "ddp": ("compress", "rank", "start"),
    "zero": ("stage",),
    "fsdp": (*_FSDP, "tensor"),
    "hsdp": ("shard", *_FSDP),
    "local-sgd": ("period", "warmup", "node_period", "moments"),
    "diloco": ("period", "outer_lr", "outer_momentum", "fragments", "overlap", "mix", "wire"),
    "parameter-server": ("servers", "mode", "staleness"),
    "hybrid": ("servers", "served"),
    "pipeline": ("stages", "schedule", "chunks", "cut", "sample"),
    "auto": (),
}
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
    name, _, rest = spec.partition(":")
    if name not in STRATEGY_WORDS:
        plain = name.lower().replace("_", "-")
        near = [_ELSEWHERE[plain]] if plain in _ELSEWHERE else difflib.get_close_matches(plain, STRATEGY_WORDS, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise SettingError(f"strategy={name!r}: {meant}give one of {', '.join(STRATEGY_WORDS)}")
    known, options = STRATEGY_WORDS[name], dict[str, str]()
    for word in rest.split(",") if rest else ():
        option, _, value = word.partition("=")
        if not option or option in options:
            raise SettingError(f"strategy={spec!r}: write NAME:OPTION=VALUE,OPTION=VALUE, each option once")
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            there = f"did you mean {near[0]}?" if near else f"it has {', '.join(known) or 'none'}"
            raise SettingError(f"strategy {name} has no option {option}; {there}")
        options[option] = value or "true"
    return name, options
