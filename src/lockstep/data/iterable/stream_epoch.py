"""The epoch that a stream is told: by its ``set_epoch``, and in the stages of `webdataset` that count epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.data.indexed.sampling import UserDataset


def tell_epoch(dataset: UserDataset, epoch: int) -> None:
    """Let ``dataset`` give the samples of ``epoch``, whatever this process has read before."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    for stage in _stages_of_webdataset(dataset):
        # The stage would count the passes begun in this process, whose number differs in a loader process, or after a
        # resume.
        if isinstance(getattr(stage, "epoch", None), int):
            stage.epoch = epoch - 1


def _stages_of_webdataset(dataset: UserDataset) -> Iterator[Any]:
    pipeline = getattr(dataset, "pipeline", None)
    for stage in pipeline if isinstance(pipeline, list) else ():
        if type(stage).__module__.startswith("webdataset."):
            yield stage
            yield from _stages_of_webdataset(stage)
