"""What stands in the way of a script in plain torch becoming one with `Run`, line by line; docs/from-single-gpu.md."""

from __future__ import annotations

import re
from typing import Final

from lockstep.verify.result import StandsInTheWay
from lockstep.verify.script_source import ScriptSource

#: Of a line, and what takes its place.
_INSTEAD: Final = (
    (r"\bDataLoader\(|DistributedSampler\(", "run.loader(dataset, global_batch=..., micro_batch=...)"),
    (r"\.backward\(\)", "run.step(loss), which takes the place of backward, optimizer.step and zero_grad"),
    (r"optim\w*\.step\(|\.zero_grad\(", "leave it out: run.step(loss) does it"),
    (r"DistributedDataParallel\(|\bDDP\(|\bDataParallel\(", "run.model(model); lockstep run --strategy ddp"),
    (r"init_process_group\(|destroy_process_group\(", "with lockstep.Run(seed=0) as run: it connects the ranks"),
    (
        r"torch\.save\(|torch\.load\(",
        "leave it out: a run saves and resumes by itself; lockstep export gives the model",
    ),
    (r"clip_grad_norm_\(", "lockstep.Run(clip_norm=...)"),
    (r"GradScaler\(|autocast\(", 'lockstep.Run(precision="bf16")'),
    (r"sched\w*\.step\(", "run.scheduler(scheduler), or run.keep(...) for one that steps once an epoch"),
    (r"manual_seed\(|random\.seed\(", "lockstep.Run(seed=...), which seeds all generators"),
    (r"for \w+ in range\(.*epoch", "for epoch in run.epochs(n):"),
    (r"\.cuda\(|\.to\((\"cuda|'cuda|device)", "leave it out: run.model moves the model, run.train the data"),
    (r"all_reduce\(|all_gather\(|\bbarrier\(", "run.sum, run.mean, run.gather, run.measure"),
    (r"get_rank\(|\blocal_rank\b|\[.RANK.\]", "nothing depends on the rank; if run.leads: for what one rank does"),
)


def to_change(source: ScriptSource) -> tuple[StandsInTheWay, ...]:
    """The lines of ``source`` that would change, each with what to write instead."""
    return tuple(
        StandsInTheWay(file, number, text.strip(), instead)
        for file, lines in source.lines.items()
        for number, text in enumerate(lines, 1)
        for pattern, instead in _INSTEAD
        if re.search(pattern, text.partition("#")[0])
    )
