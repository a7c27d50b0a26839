"""Errors for names that `Run` does not have: with the nearest name, or the replacement for another tool's name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Final

from lockstep.errors import SettingError
from lockstep.formatting import did_you_mean

_RANKS: Final = "ranks are started from outside: lockstep run --nproc-per-node 4 train.py, or lockstep.launch(main, 4)"
_BATCH: Final = "run.loader(dataset, global_batch=...) takes it, or global_batch= here, for all loaders"
#: Names of other tools' arguments, and advice for each.
_ARGUMENTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("num_gpus", "gpus", "devices", "num_processes", "ranks", "world_size", "num_nodes"), _RANKS),
    **dict.fromkeys(("batch_size", "train_batch_size"), _BATCH),
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs"), "for epoch in run.epochs(10) takes it"),
    **dict.fromkeys(("max_steps", "steps"), "for step in run.steps(1000) takes it"),
    **dict.fromkeys(("logger", "log_with"), "it is track='tensorboard', 'wandb' or 'mlflow' here"),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm", "gradient_clipping"), "it is clip_norm here"),
    **dict.fromkeys(("resume", "resume_from"), "lockstep run --resume takes it, or LOCKSTEP_RESUME=1"),
}
_ATTRIBUTES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("ranks", "size", "num_processes", "num_ranks"), "run.world_size"),
    **dict.fromkeys(("is_main_process", "is_leader", "is_global_zero", "leader"), "run.leads"),
    **dict.fromkeys(("global_step", "step_count"), "run.progress.step"),
    "epoch": "run.epochs(n), or run.progress.epoch",
    "local_rank": "run.world.local_rank",
    "print": "run.say(...)",
    "wait_for_everyone": "run.barrier()",
    **dict.fromkeys(("all_gather", "gather_for_metrics"), "run.gather(...)"),
    **dict.fromkeys(("all_reduce", "reduce"), "run.sum(...) or run.mean(...)"),
    **dict.fromkeys(
        ("prepare", "setup"), "run.model(model), run.optimizer(optimizer) and run.loader(dataset, global_batch=...)"
    ),
    "setup_dataloaders": "run.loader(dataset, global_batch=...)",
    **dict.fromkeys(("clip_grad_norm_", "clip_gradients"), "Run(clip_norm=...)"),
    **dict.fromkeys(
        ("accumulate", "no_sync", "no_backward_sync"), "run.loader(dataset, global_batch=..., micro_batch=...)"
    ),
    "autocast": "Run(precision='bf16')",
    **dict.fromkeys(("load", "load_state", "load_checkpoint"), "lockstep run --resume"),
    **dict.fromkeys(
        ("save_state", "save_checkpoint"), "Run(save_every='5 min'), and run.save(model, path) for a model"
    ),
    "register_for_checkpointing": "run.keep(name=...)",
    **dict.fromkeys(("main_process_first", "rank_zero_first"), "run.leader_first()"),
}


def refusing_unknown_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """A wrapper of ``init`` that refuses an unknown argument with an error naming the nearest known argument."""
    known = [*inspect.signature(init).parameters][1:]

    @functools.wraps(init)
    def checked(self: object, *args: object, **given: object) -> None:
        for name in given:
            if name not in known:
                instead = _ARGUMENTS.get(name) or did_you_mean(name, known, f"it takes {', '.join(known)}")
                raise SettingError(f"Run({name}=...): there is no such argument; {instead}")
        init(self, *args, **given)

    return checked


def no_attribute(run: object, name: str) -> AttributeError:
    """The error for the missing attribute ``name`` of ``run``, with the nearest name that ``run`` has."""
    public = [known for known in dir(type(run)) if not known.startswith("_")]
    meant = _ATTRIBUTES.get(name)
    advice = f"; did you mean {meant}?" if meant else f"; {did_you_mean(name, public, '')}".removesuffix("; ")
    return AttributeError(f"{type(run).__name__!r} object has no attribute {name!r}{advice}")
