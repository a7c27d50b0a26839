"""What a script computes from the number of ranks before the training, as scripts for DDP do.

optimizer = run.optimizer(SGD(model.parameters(), lr=0.1 * run.world_size))      refused: another training
batches = run.loader(data, global_batch=32 * run.world_size)                     said: the run's identity shows it
torch.manual_seed(seed + run.rank)                                               said: each micro-batch is seeded
print(run.world_size); workers = cpus // run.world_size                          changes no result
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lockstep.errors import UsageError
from lockstep.run.inputs.input_places import LENGTH, RankUse, TrainingInputs

_SCALED: Final = (
    "Nothing needs to be scaled by ranks, or seeded by rank: a step holds global_batch samples on any number of them, "
    "and each micro-batch draws its own random numbers"
)


def require_no_ranks(inputs: TrainingInputs, say: Callable[[str], None]) -> None:
    """Refuse what changes the training with the number of ranks, and ``say`` what may.

    Raises:
        UsageError: if an optimizer or a scheduler is made from it, a model or one of these is changed by it, or a loss
            is computed from it.
    """
    if inputs.failed:
        say(f"the script's source could not be read ({inputs.failed}): what a body changes is found by its effect only")
    for use in inputs.ranks:
        given = use.given
        if use.on == LENGTH or (use.on != "run.rank" and given.kind in ("registered", "write", "step")):
            raise UsageError(
                f"{given.where}: {given.what} is computed from {use.on}, so the result would depend on the number of "
                f"ranks. {_WAYS.get(use.on, _SCALED)}"
            )
    for text in dict.fromkeys(map(_said, inputs.ranks)):
        if text:
            say(text)


_WAYS: Final = {
    LENGTH: "That is the number of this rank's micro-batches, for a progress bar. A schedule counts steps: "
    "len(batches) is the number of an epoch, where batches is what run.loader(...) returned"
}


def _said(use: RankUse) -> str:
    kind, what, where, _ = use.given
    if kind == "seed" or (kind == "loader" and use.on != "run.rank"):
        return f"{where}: {what} depends on {use.on}, and the result with it. {_SCALED}"
    return ""
