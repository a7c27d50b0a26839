"""The identity of a run, on which its bits depend: compared between ranks, and with the run that is resumed."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from lockstep.checkpoint import SavedTree, StateTree
from lockstep.collectives import Group
from lockstep.data import SeenSamples
from lockstep.errors import CheckpointError, MismatchError
from lockstep.formatting import plural, without_secrets
from lockstep.run.setup.kernels import fp32_precision, number_formats
from lockstep.run.source.script_modules import file_of, script_files
from lockstep.seeding import drawn_by_script
from lockstep.settings import Settings

#: Settings of which the bits depend.
_SETTINGS: Final = ("seed", "reduction", "precision", "clip_norm", "compile")
#: Variables that choose kernels of a CPU: torch's own, and those of the libraries that it calls.
_OF_CPU_KERNELS: Final = (
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
)
_A_SET: Final = (
    "it steps them in that order and its state is stored in it, so it must be the same in each process. Do not make it "
    "from a set, such as set(model.parameters()) - heads, whose order depends on addresses; write "
    "[p for p in model.parameters() if p not in heads], with heads = set(head.parameters())"
)
#: Options of scripts for which old launchers give each rank a value of its own.
_PER_RANK: Final = ("local_rank", "node_rank", "rank", "master_addr", "master_port")


class SeenContents(NamedTuple):
    """The samples seen of a data set as a pass over the data set began."""

    epoch: int  #: the number of the pass's order
    seen: SeenSamples
    changes: bool  #: whether other samples were seen as an earlier pass began, as where the script makes new data

    def as_list(self) -> list[object]:
        """Plain values, for a checkpoint."""
        return [self.epoch, self.seen.indices, self.seen.checksum, self.changes]


class RunIdentity:
    """The script, data and settings of a run, on which its bits depend.

    Args:
        settings: of the run.
        threads: CPU threads of each rank.
        device: of this rank.
    """

    def __init__(self, settings: Settings, threads: int, device: torch.device) -> None:
        self._settings: Final = {name: getattr(settings, name) for name in _SETTINGS}
        self._threads: Final = threads
        self._device: Final = device
        self.script: StateTree = {}  #: code, arguments and optimizers, as the run began

    def note_script(self, optimizers: Sequence[torch.optim.Optimizer], models: Sequence[nn.Module]) -> None:
        """Note the script's code, arguments and optimizers, as the run begins."""
        self.script = {
            "code": code_of_user(),
            "arguments": arguments_of(sys.argv[1:]),
            "optimizers": optimizers_of(optimizers),
            "groups": names_in_groups(optimizers, models),
        }

    def data(
        self,
        sizes: Mapping[str, list[int]],
        samples: Mapping[str, int | None],
        lengths: Sequence[int | None],
        orders: Mapping[str, tuple[int, str]],
    ) -> StateTree:
        """The identity without the script; ``sizes`` and ``samples`` of loaders trained on, ``lengths`` of all loaders.

        ``orders`` are those of the loaders' current passes, where orders are drawn.
        """
        return {
            "sizes": dict(sizes),
            "samples": dict(samples),
            "lengths": list(lengths),
            "orders": {number: list(order) for number, order in orders.items()},
            **self._settings,
            **self._of_device(),
            "torch": torch.__version__,
        }

    def _of_device(self) -> StateTree:
        formats = {"fp32_precision": [*fp32_precision(self._device).values()]}
        if self._device.type == "cpu":
            return {"threads": self._threads, "device": "cpu"} | formats
        # How many CPU threads there are, which depends on the ranks of a node, changes no bit of a GPU.
        return {"device": torch.cuda.get_device_name(self._device)} | formats


def device_of_bits(device: torch.device, env: Mapping[str, str]) -> str:
    """The properties of a device and its libraries on which bits depend, in words, with the variables that set them."""
    formats = ", ".join(f"{name} {found}" for name, found in number_formats(device).items())
    if device.type == "cpu":
        chosen = [f"{name}={env[name]}" for name in _OF_CPU_KERNELS if env.get(name)]
        chosen_by = f" ({', '.join(chosen)})" if chosen else ""
        return f"a CPU by {torch.backends.cpu.get_cpu_capability()} kernels{chosen_by}, {formats}"
    properties = torch.cuda.get_device_properties(device)
    libraries = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return f"{properties.name} with {properties.multi_processor_count} multiprocessors, {libraries}, {formats}"


def compare_devices(group: Group, own: str) -> None:
    """Check that all ranks compute on equal devices; ``own`` is this rank's, by `device_of_bits`. Collective.

    Raises:
        MismatchError: naming two ranks with different devices.
    """
    first, *others = group.gather_objects(own, "the devices")
    for rank, theirs in enumerate(others, 1):
        if theirs != first:
            raise MismatchError(
                f"rank 0 computes on {first}, rank {rank} on {theirs}: kernels give other "
                "bits there, so the model would depend on which rank computes what. Start all ranks on equal devices "
                "and with equal variables (ATEN_CPU_CAPABILITY=avx2 on all has newer CPUs use older ones' kernels), "
                "or give up equal bits by Run(reduction='fast')"
            )


def compare_draws(group: Group, say: Callable[[str], None]) -> None:
    """Warn if the script has drawn different random numbers on some ranks, before the run seeds all. Collective."""
    first, *others = group.gather_objects(drawn_by_script(), "comparison of random numbers")
    for rank, states in enumerate(others, start=1):
        if found := [name for name in {**first, **states} if states.get(name) != first.get(name)]:
            say(
                f"before Run(...), rank {rank} drew other random numbers than rank 0 ({', '.join(found)}): models "
                "begin with rank 0's values, but whatever else was made of them is another one on each rank. Make it "
                "after Run(...), which seeds all ranks alike"
            )
            return


def code_of_user(modules: Mapping[str, ModuleType] | None = None) -> dict[str, str]:
    """SHA-256 of the script (as ``script``) and of each module of the user's that is loaded, by name.

    Installed modules and modules without a file, such as a notebook, are left out. Takes about 0.1 ms per module.
    """
    found = {}
    files = script_files() if modules is None else {name: file_of(module) for name, module in modules.items()}
    for name, file in files.items():
        if not file.endswith(".py"):
            continue
        try:
            digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        except OSError:
            continue  # the file was removed since the module was loaded
        found["script" if name == "__main__" else name] = digest
    if "script" in found:  # the launcher also loads the script under another name
        found = {name: digest for name, digest in found.items() if name == "script" or digest != found["script"]}
    return found


def arguments_of(argv: Sequence[str]) -> list[str]:
    """The script's arguments without secrets and without options that differ between ranks by design."""
    kept, skip = [], False
    for argument in argv:
        name, equals, _ = argument.lstrip("-").partition("=")
        if skip:
            skip = False
        elif argument.startswith("-") and name.replace("-", "_") in _PER_RANK:
            skip = not equals
        else:
            kept.append(argument)
    return without_secrets(kept)


def optimizers_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[Any]]:
    """The class of each optimizer, and the plain options of each of its groups, as text."""
    return [
        [type(optimizer).__name__, [_options(group) for group in optimizer.param_groups]] for optimizer in optimizers
    ]


def names_in_groups(optimizers: Sequence[torch.optim.Optimizer], models: Sequence[nn.Module]) -> list[list[str]]:
    """The names of the parameters in each group of each optimizer, in order; "?" for a parameter of no model."""
    names = {
        parameter: f"{name} of model {number}" if number else name
        for number, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }
    groups = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
    return [[names.get(parameter, "?") for parameter in group] for group in groups]


def _other_order(one: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> tuple[str, str] | None:
    """The first pair of different names, if a group holds equal parameters in another order; else None."""
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs and sorted(mine) == sorted(theirs):
            return next((a, b) for a, b in zip(mine, theirs, strict=True) if a != b)
    return None


def compare_ranks(group: Group, script: SavedTree) -> None:
    """Check that all ranks run the same ``script``: code, arguments and optimizers. Collective.

    A module that only some ranks have loaded is not compared.

    Raises:
        MismatchError: naming the difference and the rank.
    """
    first, *others = group.gather_objects(dict(script), "the code and the settings of the script")
    for rank, theirs in enumerate(others, 1):
        files = changed_code(theirs["code"], first["code"])
        if files:
            raise MismatchError(
                f"rank {rank} runs another {', '.join(files[:5])} than rank 0: the files differ in content. Give every "
                "node the same files"
            )
        if names := _other_order(first["groups"], theirs["groups"]):
            raise MismatchError(
                f"rank 0 has {names[0]} where rank {rank} has {names[1]} among the parameters of an optimizer: {_A_SET}"
            )
        for name in sorted(theirs.keys() - {"code", "groups"}):
            if theirs[name] != first[name]:
                where, ours, other = _first_difference(first[name], theirs[name])
                raise MismatchError(
                    f"the {name} of the script differ{where and f' in {where}'}: rank 0 has {ours!r:.300}, rank {rank} "
                    f"{other!r:.300}. All ranks must run the same script with the same arguments; of numbers that a "
                    "rank computes from its own micro-batches, such as a loss, use run.metrics, or bring them together "
                    "by run.sum(...)"
                )


def _first_difference(one: object, other: object, where: str = "") -> tuple[str, object, object]:
    """The innermost key, "" for none, at which two nested values differ first, and what each has there."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        key = next(key for key in one if one[key] != other[key])
        return _first_difference(one[key], other[key], str(key))
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pair = next((a, b) for a, b in zip(one, other, strict=True) if a != b)
        return _first_difference(*pair, where)
    return where, one, other


def changed_code(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """The names of modules that are in both and differ."""
    return [name for name, digest in now.items() if before.get(name, digest) != digest]


def _options(group: SavedTree) -> dict[str, str]:
    options = {}
    for name, value in group.items():
        if name == "params":
            continue
        options[name] = _text(value)
    return options


def _text(value: object) -> str:
    """The text of ``value``, equal in every process: without addresses and devices."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def differences(before: SavedTree, now: SavedTree) -> list[str]:
    """Texts about the differences in identity between a resumed run, ``now``, and the run that saved.

    Raises:
        CheckpointError: for an optimizer of another class.
    """
    texts: list[str] = []
    for name, value in now.items():
        if name in before and name not in _CHECKED_ELSEWHERE:
            texts += _DESCRIBE.get(name, partial(_describe_value, name))(before[name], value)
    return texts


def _describe_value(name: str, before: object, now: object) -> list[str]:
    return [f"resumed with {name}={now}, saved with {before}: the bits differ from here on"] if before != now else []


def _describe_code(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    changed = changed_code(now, before)
    names = ", ".join(changed[:5])
    return [f"changed since the checkpoint was saved: {names}; the bits may differ from here on"] if changed else []


def _describe_arguments(before: Sequence[str], now: Sequence[str]) -> list[str]:
    if before == now:
        return []
    return [
        f"the script's arguments are {' '.join(now)!r}, and were {' '.join(before)!r} when the checkpoint was saved"
    ]


def _describe_lengths(before: Sequence[int | None], now: Sequence[int | None]) -> list[str]:
    pairs = [(was, is_now) for was, is_now in zip(before, now, strict=False) if was != is_now]
    return [
        f"a data set has {is_now if is_now is None else plural(is_now, 'sample')}, and had {was}: unless the script "
        "itself makes the data longer or shorter, the bits differ from here on"
        for was, is_now in pairs
    ]


def _describe_contents(before: Mapping[str, Sequence[object]], now: Mapping[str, Sequence[object]]) -> list[str]:
    texts = []
    for name in now.keys() & before.keys():
        (was_epoch, indices, was, changed), (epoch, looked_at, found, changes) = before[name], now[name]
        if was == found or indices != looked_at:
            continue
        where = f"a data set of the script (run.loader number {name}) holds other samples than when the checkpoint was"
        if epoch == was_epoch:
            texts.append(
                f"{where} saved, in the same epoch: the bits differ from here on. Keep what the script has made, such "
                "as labels or episodes, with run.keep(...); draw a split with a seed of its own, or after Run(...) has "
                "begun"
            )
        elif not (changed or changes or name.startswith("+")):
            texts.append(
                f"{where} saved: unless the script makes new samples in each epoch, the bits differ from here on. Draw "
                "a split with a seed of its own, or after Run(...) has begun"
            )
    return texts


def _check_optimizers(before: Sequence[Any], now: Sequence[Any]) -> list[str]:
    # Options are compared where optimizers are loaded.
    for (was, _), (kind, _) in zip(before, now, strict=False):
        if was != kind:
            raise CheckpointError(
                f"the checkpoint's optimizer is {was}, and this script's {kind}, which has another state: use "
                f"{was}, or start over with --fresh"
            )
    return []


def _check_groups(before: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> list[str]:
    if names := _other_order(before, now):
        raise CheckpointError(
            f"the checkpoint's optimizer had {names[0]} where this script's has {names[1]} among its parameters: "
            f"{_A_SET}, and start over with --fresh"
        )
    return []


#: The functions that describe a difference in each part of an identity, other than by its values.
_DESCRIBE: Final[dict[str, Callable[[Any, Any], list[str]]]] = {
    "code": _describe_code,
    "arguments": _describe_arguments,
    "lengths": _describe_lengths,
    "contents": _describe_contents,
    "optimizers": _check_optimizers,
    "groups": _check_groups,
}
#: Checked in `DirectoryCheckpointer.compare`, where the position is known.
_CHECKED_ELSEWHERE: Final = ("sizes", "samples", "orders")
