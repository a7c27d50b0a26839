"""The arguments of `Run.loader`: its own, those of torch's `DataLoader`, or a `DataLoader` itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from lockstep.data import CollateFunction, OrderFunction, TorchLoader, UserDataset
from lockstep.errors import SettingError, UsageError
from lockstep.formatting import did_you_mean
from lockstep.settings import ResolvedSettings

#: Arguments of torch's `DataLoader` that `Run.loader` does not have, with a replacement for each.
_INSTEAD: Final[Mapping[str, str]] = {
    "batch_size": "it is called global_batch here: the samples of one step, over all ranks",
    "num_workers": "it is called workers here",
    "generator": (
        "leave it out: the order depends on Run(seed=...) and the epoch alone; for one of your own give sampler= or "
        "order=function of (epoch, generator)"
    ),
    "persistent_workers": "leave it out: loader processes live through all epochs",
    "multiprocessing_context": "leave it out, and call torch.multiprocessing.set_start_method(...) before the run",
    "pin_memory_device": "leave it out: it is the device of this rank",
    "in_order": "leave it out: the order is always kept",
}


@dataclass(frozen=True, slots=True)
class LoaderArguments:
    """The arguments of `Run.loader`, explained there, before settings are applied; None: not given."""

    dataset: UserDataset
    global_batch: int | None = None
    micro_batch: int | None = None
    shuffle: bool | None = None
    sampler: Iterable[Any] | None = None
    batch_sampler: Iterable[Any] | None = None
    order: OrderFunction | None = None
    drop_last: bool = False
    collate_fn: CollateFunction | None = None
    workers: int | None = None
    worker_init_fn: Callable[[int], object] | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    timeout: float = 0.0

    def _under(self, resolved: ResolvedSettings) -> LoaderArguments:
        """The arguments merged with settings: above the script's settings, below command line and environment."""
        taken: dict[str, Any] = {}
        for name in ("global_batch", "micro_batch", "workers"):
            outside = resolved.from_outside(name)
            if name == "global_batch" and self.batch_sampler is not None:
                if outside is not None:
                    raise SettingError(
                        f"global_batch={outside} given from outside, where run.loader(batch_sampler=...) makes each "
                        "batch; leave it out"
                    )
                continue
            own = getattr(self, name)
            taken[name] = next((v for v in (outside, own, getattr(resolved.values, name)) if v is not None), None)
        step = taken.get("global_batch")
        if None not in (step, resolved.from_outside("micro_batch")) and resolved.from_outside("global_batch") is None:
            # The micro-batch was given for all loaders; a loader with a smaller step has its step as its micro-batch.
            taken["micro_batch"] = min(taken["micro_batch"], step)
        return replace(self, **taken)

    def checked(self, others: Mapping[str, object], resolved: ResolvedSettings) -> LoaderArguments:
        """The arguments, with those of a `DataLoader` if the data set is one, merged with the settings.

        Raises:
            SettingError: for a global batch from outside, where a batch sampler makes the batches.
            UsageError: for an argument in ``others``, which `Run.loader` does not have, for arguments that exclude each
                other, or for a `DataLoader` whose arguments cannot be taken over.
        """
        for name in others:
            if name in _INSTEAD:
                raise UsageError(f"run.loader({name}=...): {_INSTEAD[name]}")
            known = [*(field.name for field in fields(LoaderArguments)), *_INSTEAD]
            raise UsageError(f"run.loader({name}=...): there is no such argument; {did_you_mean(name, known)}")
        found = (self._of_data_loader(self.dataset) if type(self.dataset) is DataLoader else self)._under(resolved)
        if found.batch_sampler is None and found.global_batch is None:
            raise UsageError(
                "run.loader(dataset, global_batch=...): say how many samples a step holds, over all ranks; or give "
                "batch_sampler=, of which each batch is a step"
            )
        if found.batch_sampler is not None and (found.global_batch is not None or found.drop_last):
            odd = "drop_last" if found.global_batch is None else "global_batch"
            raise UsageError(
                f"run.loader(batch_sampler=..., {odd}=...): each batch is one step, so leave {odd} out; micro_batch "
                "divides it"
            )
        if found.prefetch_factor is not None and found.prefetch_factor < 1:
            raise UsageError(f"run.loader(prefetch_factor={found.prefetch_factor}): give at least 1, or leave it out")
        return found

    def _of_data_loader(self, loader: TorchLoader) -> LoaderArguments:
        """The arguments with which ``loader`` was made; its batch is a step."""
        given = [
            name
            for name in ("global_batch", "shuffle", "sampler", "batch_sampler", "order", "drop_last", "collate_fn")
            if getattr(self, name) not in (None, False)
        ]
        if given:
            raise UsageError(
                f"run.loader(DataLoader(...), {given[0]}=...): the DataLoader says it already; say it there, or give "
                "its data set: run.loader(loader.dataset, global_batch=...)"
            )
        taken = replace(
            self,
            dataset=loader.dataset,
            collate_fn=None if loader.collate_fn is default_collate else loader.collate_fn,
            workers=loader.num_workers if self.workers is None else self.workers,
            worker_init_fn=self.worker_init_fn or loader.worker_init_fn,
            prefetch_factor=self.prefetch_factor or loader.prefetch_factor,
            timeout=self.timeout or loader.timeout,
        )
        batches = loader.batch_sampler
        if loader.batch_size is None and batches is not None:
            return replace(taken, batch_sampler=batches)
        if loader.batch_size is None:
            raise UsageError(
                "run.loader(DataLoader(batch_size=None)): it makes no batches; give its data set, with global_batch="
            )
        taken = replace(taken, global_batch=loader.batch_size, drop_last=loader.drop_last)
        sampler = loader.sampler
        if isinstance(loader.dataset, IterableDataset):  # torch gives it a sampler without meaning
            return taken
        if type(sampler) is SequentialSampler:
            return replace(taken, shuffle=False)
        if (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and sampler.num_samples == len(sampler.data_source)
        ):
            return replace(taken, shuffle=True)
        return replace(taken, sampler=sampler)
