"""What a run may be told, the defaults, and where each value came from.

A value is taken from the first of: an option of ``lockstep run``, the environment (``LOCKSTEP_PRECISION=bf16``), the
argument that the script gives to `Run`, the default. So a script is swept without editing it.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from lockstep.errors import SettingError

#: The environment variable in which ``lockstep run`` hands its options to the ranks, as one JSON object.
OPTIONS_VARIABLE = "LOCKSTEP_SETTINGS"
_PREFIX = "LOCKSTEP_"

Unit = Literal["step", "second", "epoch"]
_SECONDS_OF = {"s": 1, "sec": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hour": 3600}


@dataclass(frozen=True, slots=True)
class Interval:
    """How often something is done, such as every 100 steps, 300 seconds or 1 epoch."""

    every: float
    unit: Unit

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``"2 steps"``, ``"5 min"``, ``"1 epoch"``, ``"90 s"``.

        Raises:
            SettingError: if the text is none of these.
        """
        number, _, word = str(text).strip().partition(" ")
        word = word.strip().lower()
        singular = word.removesuffix("s") if word != "s" else word
        try:
            every = float(number)
            if not 0 < every < math.inf:
                raise ValueError
            if singular in ("step", "epoch"):
                if every != int(every):
                    raise ValueError
                cadence = cls(every, "step" if singular == "step" else "epoch")
            else:
                cadence = cls(every * _SECONDS_OF[singular], "second")
        except (ValueError, KeyError):
            raise SettingError(
                f"save_every={text!r}: give a number and a unit, such as '100 steps', '5 min' or '1 epoch'"
            ) from None
        return cadence

    def __str__(self) -> str:
        """Such as ``100 steps``."""
        return f"{self.every:g} {self.unit}{'' if self.every == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Settings:
    """What one run was told; every field can be set from the script, the environment and the command line."""

    seed: int = 0  #: of everything random: initial weights, order of samples, augmentation, dropout
    strategy: str = "ddp"  #: how replicas are kept in step, with options: NAME:OPTION=VALUE,...
    rehearse: bool = False  #: ranks may share a GPU, and CPU threads stand in for GPUs
    reduction: Literal["exact", "fast"] = "exact"  #: the fixed tree, or torch's own all-reduce without promise of bits
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  #: of the forward pass; parameters stay fp32
    checkpoint: str | None = None  #: directory of the checkpoints; None: the run directory's, or nothing is saved
    save_every: Interval | None = None  #: how often a checkpoint is saved beside the one at the end
    keep: int = 3  #: checkpoints kept, the newest ones
    clip_norm: float | None = None  #: greatest global norm of the gradient of one step
    sync_batchnorm: bool = False  #: BatchNorm over the micro-batches of all ranks, not over each
    compile: bool = False  #: `torch.compile` each model
    threads: int | None = None  #: CPU threads per rank, part of the run's identity; None: one
    workers: int | None = None  #: loader processes per rank; None: chosen from the CPUs and the data
    bucket_mb: float | None = None  #: MiB of gradients exchanged at once; None: chosen for the link
    on_nan: Literal["stop", "warn", "ignore"] = "stop"  #: what a loss or gradient that is not finite leads to
    check_every: int = 500  #: steps between two comparisons of the ranks' values, beside those at saves
    peer_timeout_s: float = 600.0  #: how long a collective waits for the other ranks

    def __post_init__(self) -> None:
        for name, allowed in (
            ("reduction", ("exact", "fast")),
            ("precision", ("fp32", "bf16", "fp16")),
            ("on_nan", ("stop", "warn", "ignore")),
        ):
            if getattr(self, name) not in allowed:
                raise SettingError(f"{name}={getattr(self, name)!r}: give one of {', '.join(allowed)}")
        for name, least in (("keep", 1), ("threads", 1), ("workers", 0), ("seed", 0), ("check_every", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise SettingError(f"{name}={value}: it must be at least {least}")
        for name in ("clip_norm", "bucket_mb", "peer_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SettingError(f"{name}={value}: it must be greater than 0")


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """Settings together with where each value came from."""

    values: Settings
    sources: Mapping[str, str]

    @classmethod
    def gather(cls, given: Mapping[str, Any], env: Mapping[str, str]) -> Self:
        """The settings for a run whose script gave ``given``, under the environment ``env``.

        Raises:
            SettingError: for a name that is no setting (with the nearest one) or a value that cannot be used.
        """
        values: dict[str, Any] = {}
        sources = {f.name: "default" for f in fields(Settings)}
        options = json.loads(env.get(OPTIONS_VARIABLE, "{}"))
        by_environment = {
            name: env[_PREFIX + name.upper()] for name in sources if env.get(_PREFIX + name.upper(), "") != ""
        }
        for source, layer in (("script", given), ("environment", by_environment), ("command line", options)):
            for name, value in layer.items():
                values[name] = parse(name, value)
                sources[name] = source
        return cls(Settings(**values), sources)

    def __iter__(self) -> Iterator[tuple[str, Any, str]]:
        """Each setting as (name, value, source)."""
        return ((name, getattr(self.values, name), source) for name, source in self.sources.items())

    def as_dict(self) -> dict[str, str | int | float | bool | None]:
        """Plain values, for the record of a run."""
        return {name: str(value) if isinstance(value, Interval) else value for name, value, _ in self}

    def __str__(self) -> str:
        """One line for each setting, with its source."""
        return "\n".join(f"{name} = {value} ({source})" for name, value, source in self)


def parse(name: str, value: Any) -> Any:
    """``value`` as setting ``name`` holds it; text, as from a command line, is read.

    Raises:
        SettingError: if there is no such setting, or the text cannot be read as its value.
    """
    if name not in _READ:
        near = difflib.get_close_matches(name, _READ, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_READ)}"
        raise SettingError(f"{name}: no such setting; {hint}")
    read, what = _READ[name]
    if not isinstance(value, str):
        return value if name != "save_every" or value is None or isinstance(value, Interval) else Interval.parse(value)
    if value.lower() == "none" and name in _OPTIONAL:
        return None
    try:
        return read(value)
    except SettingError:
        raise
    except (ValueError, KeyError):
        raise SettingError(f"{name}={value!r}: give {what}") from None


def _truth(text: str) -> bool:
    return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]


_WHOLE: tuple[Callable[[str], Any], str] = (int, "a whole number")
_REAL: tuple[Callable[[str], Any], str] = (float, "a number")
_TEXT: tuple[Callable[[str], Any], str] = (str, "a word")
_TRUTH: tuple[Callable[[str], Any], str] = (_truth, "true or false")
_READ: dict[str, tuple[Callable[[str], Any], str]] = {
    "seed": _WHOLE,
    "strategy": _TEXT,
    "rehearse": _TRUTH,
    "reduction": _TEXT,
    "precision": _TEXT,
    "checkpoint": _TEXT,
    "save_every": (Interval.parse, "a number and a unit"),
    "keep": _WHOLE,
    "clip_norm": _REAL,
    "sync_batchnorm": _TRUTH,
    "compile": _TRUTH,
    "threads": _WHOLE,
    "workers": _WHOLE,
    "bucket_mb": _REAL,
    "on_nan": _TEXT,
    "check_every": _WHOLE,
    "peer_timeout_s": _REAL,
}
_OPTIONAL = {"checkpoint", "save_every", "clip_norm", "threads", "workers", "bucket_mb"}
