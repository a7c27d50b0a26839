"""The settings of a run, their defaults, and where each value came from.

A value is taken from the first of: an option of ``lockstep run``, the environment (``LOCKSTEP_PRECISION=bf16``), the
argument that the script gives to `Run`, the default. So a script is swept without editing it.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, Self, TypeVar

import lockstep.launch_contract as launch_contract
from lockstep.errors import SettingError
from lockstep.formatting import did_you_mean

T = TypeVar("T")

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
    def parse(cls, text: str, setting: str = "save_every") -> Self:
        """Read ``"2 steps"``, ``"5 min"``, ``"1 epoch"``, ``"90 s"``, the value of ``setting``.

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
                interval = cls(every, "step" if singular == "step" else "epoch")
            else:
                interval = cls(every * _SECONDS_OF[singular], "second")
        except (ValueError, KeyError):
            raise SettingError(
                f"{setting}={text!r}: give a number and a unit, such as '100 steps', '5 min' or '1 epoch'"
            ) from None
        return interval

    def __str__(self) -> str:
        """Such as ``100 steps``."""
        return f"{self.every:g} {self.unit}{'' if self.every == 1 else 's'}"


#: Words in the names of metrics of which it is plain what is better.
_LESS_IS_BETTER = frozenset(("loss", "error", "perplexity"))
_MORE_IS_BETTER = frozenset(("accuracy", "acc", "f1", "auc", "iou", "bleu"))


@dataclass(frozen=True, slots=True)
class BestMetric:
    """The metric by which checkpoints are judged, and what is better."""

    mode: Literal["min", "max"]
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``"max accuracy"``, ``"min val_loss"``, or a name of which it is plain what is better.

        Raises:
            SettingError: if the text is none of these.
        """
        words = str(text).split()
        if len(words) == 2 and words[0] in ("min", "max"):
            return cls("min" if words[0] == "min" else "max", words[1])
        parts = set(re.findall("[a-z]+1?", str(text).lower()))
        less, more = bool(parts & _LESS_IS_BETTER), bool(parts & _MORE_IS_BETTER)
        if len(words) != 1 or less == more:
            name = words[-1] if words else "accuracy"
            raise SettingError(f"best={text!r}: say what is better, 'max {name}' or 'min {name}'")
        return cls("min" if less else "max", words[0])

    def is_better(self, value: float, than: float) -> bool:
        """Whether ``value`` is better than the other."""
        return value < than if self.mode == "min" else value > than

    def __str__(self) -> str:
        """Such as ``max accuracy``."""
        return f"{self.mode} {self.name}"


@dataclass(frozen=True, slots=True)
class StepRange:
    """Some steps of a run, by how many are done: from when ``first`` are, to when ``last`` are."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``"steps 10:20"``, which are ten steps: the 11th to the 20th.

        Raises:
            SettingError: if the text is none, or of no step.
        """
        match = re.fullmatch(r"\s*steps?\s+(\d+)\s*:\s*(\d+)\s*", str(text))
        if match is None:
            raise SettingError(
                f"profile={text!r}: give a range of steps, such as 'steps 10:20', from when 10 are done to when 20 are"
            )
        first, last = int(match[1]), int(match[2])
        if first >= last:
            raise SettingError(f"profile={text!r}: it ends before a step is done; give 'steps {first}:{first + 10}'")
        return cls(first, last)

    def __str__(self) -> str:
        """Such as ``steps 10:20``."""
        return f"steps {self.first}:{self.last}"


@dataclass(frozen=True, slots=True)
class Reader:
    """How a text becomes a value of one type."""

    read: Callable[[str], Any]  #: ValueError or KeyError for a text that is none
    wants: str  #: such as "a whole number"


_TRUTHS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_READERS = {
    "int": Reader(int, "a whole number"),
    "float": Reader(float, "a number"),
    "bool": Reader(lambda text: _TRUTHS[text.lower()], "true or false"),
    "Interval": Reader(Interval.parse, "a number and a unit"),
    "BestMetric": Reader(BestMetric.parse, "max or min, and the name of a metric"),
    "StepRange": Reader(StepRange.parse, "a range of steps"),
}
_WORD = Reader(str, "a word")
_READ = (Interval, BestMetric, StepRange)  # whose text is the value as it was given


def reader_of(field: Field[object]) -> Reader:
    """How a text is read for ``field`` of a dataclass, by its type; of another type than these it is a word."""
    annotation = field.type  # a text, where annotations are not evaluated
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return _READERS.get(name.removesuffix(" | None"), _WORD)


def read_options(what: str, kind: type[T], options: Mapping[str, str]) -> T:
    """The frozen dataclass ``kind`` with ``options``, each read by the type of its field.

    Args:
        what: has these options, such as ``strategy ddp``; for messages.
        kind: a dataclass with a default for each field.
        options: texts by the names of fields.

    Raises:
        SettingError: for a value that cannot be read.
    """
    known: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    values = {}
    for option, text in options.items():
        reader = reader_of(known[option])
        try:
            values[option] = reader.read(text)
        except (ValueError, KeyError):
            raise SettingError(f"{what}: {option}={text!r}; give {reader.wants}") from None
    return kind(**values)


def _about(
    meaning: str, *, one_of: Sequence[str] = (), least: int | None = None, above: int | None = None
) -> dict[str, object]:
    """The metadata of a field of `Settings`: what it means, and which values can be used."""
    return {"meaning": meaning, "one_of": one_of, "least": least, "above": above}


@dataclass(frozen=True, slots=True)
class Settings:
    """What one run is set to; every field can be given by the script, the environment and the command line.

    The only declaration of the settings: a field's type says how its text is read, ``None`` that it may be absent.

    Raises:
        SettingError: for a value that cannot be used.
    """

    seed: int = field(
        default=0,
        metadata=_about("of everything random: initial weights, order of samples, augmentation, dropout", least=0),
    )
    strategy: str = field(
        default="ddp", metadata=_about("how replicas are kept in step, with options: NAME:OPTION=VALUE,...")
    )
    rehearse: bool = field(default=False, metadata=_about("ranks may share a GPU, and CPU threads stand in for GPUs"))
    reduction: Literal["exact", "fast"] = field(
        default="exact",
        metadata=_about("the fixed tree, or torch's own all-reduce without promise of bits", one_of=("exact", "fast")),
    )
    precision: Literal["fp32", "bf16", "fp16"] = field(
        default="fp32", metadata=_about("of the forward pass; parameters stay fp32", one_of=("fp32", "bf16", "fp16"))
    )
    checkpoint: str | None = field(
        default=None, metadata=_about("directory of the checkpoints; None: the run directory's, or nothing is saved")
    )
    save_every: Interval | None = field(
        default=None, metadata=_about("how often a checkpoint is saved beside the one at the end")
    )
    log_every: Interval | None = field(
        default=None, metadata=_about("how often means of the training are logged beside `run.log`, in steps")
    )
    track: str | None = field(
        default=None,
        metadata=_about("who gets what is logged, too: tensorboard, wandb, mlflow, or several with commas"),
    )
    profile: StepRange | None = field(
        default=None, metadata=_about("'steps 10:20': what each rank does in these steps, recorded by torch.profiler")
    )
    keep: int = field(default=3, metadata=_about("checkpoints kept, the newest ones", least=1))
    resume_options: Literal["checkpoint", "script"] = field(
        default="checkpoint",
        metadata=_about(
            "whose options of optimizers, such as lr, a resumed run has where the script's have changed",
            one_of=("checkpoint", "script"),
        ),
    )
    emergency: bool = field(
        default=True,
        metadata=_about(
            "on CPUs: ranks that lose another one leave the last finished step in memory for the next generation"
        ),
    )
    mirror: bool = field(
        default=False,
        metadata=_about("each rank copies its part of the state into memory after every step, for the next generation"),
    )
    best: BestMetric | None = field(
        default=None,
        metadata=_about("'max accuracy', 'min val_loss': the checkpoint of the best value is kept, too"),
    )
    clip_norm: float | None = field(
        default=None, metadata=_about("greatest global norm of the gradient of one step", above=0)
    )
    sync_batchnorm: bool = field(
        default=False, metadata=_about("BatchNorm over the micro-batches of all ranks, not over each")
    )
    compile: bool = field(default=False, metadata=_about("`torch.compile` each model"))
    threads: int | None = field(
        default=None, metadata=_about("CPU threads per rank, part of the run's identity; None: one", least=1)
    )
    workers: int | None = field(
        default=None, metadata=_about("loader processes per rank; None: chosen from the CPUs and the data", least=0)
    )
    global_batch: int | None = field(
        default=None, metadata=_about("samples per step of each loader; None: what the loader was given", least=1)
    )
    micro_batch: int | None = field(
        default=None, metadata=_about("samples of one forward pass; None: what the loader was given", least=1)
    )
    bucket_mb: float | None = field(
        default=None, metadata=_about("MiB of gradients exchanged at once; None: chosen for the link", above=0)
    )
    on_nan: Literal["stop", "locate", "warn", "ignore"] = field(
        default="stop",
        metadata=_about(
            "what a loss or gradient that is not finite leads to", one_of=("stop", "locate", "warn", "ignore")
        ),
    )
    nondeterministic: Literal["refuse", "warn"] = field(
        default="refuse",
        metadata=_about(
            "what an operation without a deterministic GPU kernel in a backward pass leads to",
            one_of=("refuse", "warn"),
        ),
    )
    replay: bool = field(
        default=True,
        metadata=_about("now and then a micro-batch is computed twice, which must give the same; False: never"),
    )
    audit: Interval | None = field(
        default=None,
        metadata=_about("how often, in steps, ranks compute a micro-batch of each other's before the update"),
    )
    verify_saves: bool = field(default=False, metadata=_about("what was saved is read back before it is committed"))
    check_every: int = field(
        default=500,
        metadata=_about("steps between two comparisons of the ranks' values, beside those at saves", least=1),
    )
    peer_timeout_s: float = field(
        default=600.0, metadata=_about("how long a collective waits for the other ranks", above=0)
    )

    def __post_init__(self) -> None:
        for name, declared in _FIELDS.items():
            value = getattr(self, name)
            if value is None:
                continue
            one_of, least, above = (declared.metadata[key] for key in ("one_of", "least", "above"))
            if one_of and value not in one_of:
                raise SettingError(f"{name}={value!r}: give one of {', '.join(one_of)}")
            if least is not None and value < least:
                raise SettingError(f"{name}={value}: it must be at least {least}")
            if above is not None and not value > above:
                raise SettingError(f"{name}={value}: it must be greater than {above}")
        if self.mirror and not self.emergency:
            raise SettingError(
                "mirror=True with emergency=False: the next generation of ranks would go on from the mirror, and with "
                "emergency=False it goes on from a checkpoint; leave one of them out"
            )
        for name, interval in (("log_every", self.log_every), ("audit", self.audit)):
            if interval is not None and interval.unit != "step":
                raise SettingError(f"{name}='{interval}': give a number of steps, such as '50 steps'")
        if self.audit is not None and not self.replay:
            raise SettingError(
                f"audit='{self.audit}' with replay=False: an audit computes a micro-batch twice, which a body with "
                "effects does not allow; leave one of them out"
            )


_FIELDS: Mapping[str, Field[Any]] = {declared.name: declared for declared in fields(Settings)}

#: Variables that are meant for Lockstep: settings, what launchers and runs agree on, and what some rooms have alone.
_VARIABLES = frozenset(
    {value for value in vars(launch_contract).values() if isinstance(value, str) and value.startswith(_PREFIX)}
    | {f"{_PREFIX}{name.upper()}" for name in _FIELDS}
    | {f"{_PREFIX}{name}" for name in ("VIEW", "SECRET", "SETTINGS", "RESULT", "LOCAL_RANK_OPTION")}
)
#: As alike as a word and its misspelling; less alike are variables of somebody else's.
_ALIKE = 0.85


def check_variables(env: Mapping[str, str]) -> None:
    """Check that no variable in ``env`` is a misspelt one of Lockstep's, which would do nothing, in silence.

    Raises:
        SettingError: naming it and the one that was probably meant.
    """
    for name in sorted(env):
        if name.startswith(_PREFIX) and name not in _VARIABLES:
            near = difflib.get_close_matches(name, _VARIABLES, n=1, cutoff=_ALIKE)
            if near:
                raise SettingError(f"the environment variable {name} is none of Lockstep's; did you mean {near[0]}?")


def options_given(env: Mapping[str, str]) -> dict[str, object]:
    """The settings that the launcher of this process hands on to it, as it was given them."""
    given: dict[str, Any] = json.loads(env.get(OPTIONS_VARIABLE, "{}"))
    return given


@dataclass(frozen=True, slots=True)
class SettingsLayer:
    """What a file says of settings, below what the script says."""

    values: Mapping[str, Any]  #: numbers, texts and truth values
    place: Callable[[str], str]  #: of a name in the file, as ``lockstep.toml:3``
    wrong: tuple[str, ...] = ()  #: what else is wrong in the file, in words

    def texts(self) -> dict[str, str]:
        """The values as a command line has them.

        Raises:
            SettingError: for a list, a table or a date.
        """
        return {name: _as_text(name, value) for name, value in self.values.items()}


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """Settings together with where each value came from."""

    values: Settings
    sources: Mapping[str, str]

    @classmethod
    def resolve(cls, given: Mapping[str, object], env: Mapping[str, str], layers: Sequence[SettingsLayer] = ()) -> Self:
        """The settings for a run whose script gave ``given``, under the environment ``env``.

        Args:
            given: values by name.
            env: the environment.
            layers: below these, each over those before it.

        Raises:
            SettingError: for a name that is no setting (with the nearest one), a value that cannot be used, or a
                misspelt variable; all that is wrong in ``layers`` at once.
        """
        check_variables(env)
        values: dict[str, Any] = {}
        sources = dict.fromkeys(_FIELDS, "default")
        options = options_given(env)
        by_environment = {
            name: env[_PREFIX + name.upper()] for name in sources if env.get(_PREFIX + name.upper(), "") != ""
        }
        wrong: list[str] = []
        for below in layers:
            wrong += below.wrong
            for name, value in below.values.items():
                try:
                    values[name] = parse(name, _as_text(name, value))
                    Settings(**{name: values[name]})
                    sources[name] = below.place(name)
                except SettingError as error:
                    wrong.append(f"{below.place(name)}: {error}")
        if wrong:
            raise SettingError("\n  ".join(wrong))
        for source, layer in (("script", given), ("environment", by_environment), ("command line", options)):
            for name, value in layer.items():
                values[name] = parse(name, value)
                sources[name] = source
        return cls(Settings(**values), sources)

    def from_outside(self, name: str) -> object:
        """The value of a setting that the command line or the environment gave; None: neither did."""
        return getattr(self.values, name) if self.sources[name] in ("command line", "environment") else None

    def __iter__(self) -> Iterator[tuple[str, Any, str]]:
        """Each setting as (name, value, source)."""
        return ((name, getattr(self.values, name), source) for name, source in self.sources.items())

    def as_dict(self) -> dict[str, str | int | float | bool | None]:
        """Plain values, for the record of a run."""
        return {name: str(value) if isinstance(value, _READ) else value for name, value, _ in self}

    def __str__(self) -> str:
        """One line for each setting, with its source."""
        return "\n".join(f"{name} = {value} ({source})" for name, value, source in self)


def _as_text(name: str, value: object) -> str:
    """A value of a file as a command line has it.

    Raises:
        SettingError: for a list, a table or a date.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise SettingError(f"{name} = {value!r}: give a text, a number, true or false")
    return str(value)


def parse(name: str, value: Any) -> Any:
    """``value`` as setting ``name`` holds it; text, as from a command line, is read, and a number as its text.

    Raises:
        SettingError: if there is no such setting, or the value cannot be read as one of its kind.
    """
    if name not in _FIELDS:
        raise SettingError(f"{name}: no such setting; {did_you_mean(name, _FIELDS)}")
    reader, is_optional = reader_of(_FIELDS[name]), str(_FIELDS[name].type).endswith("| None")
    if isinstance(value, _READ) or (is_optional and (value is None or str(value).lower() == "none")):
        return None if isinstance(value, str) else value
    if reader is _READERS["Interval"]:
        return Interval.parse(value, name)
    try:
        if reader is _WORD and not isinstance(value, str) and not _FIELDS[name].metadata["one_of"]:
            raise ValueError(value)
        return reader.read(str(value))
    except (ValueError, KeyError):
        raise SettingError(f"{name}={value!r}: give {reader.wants}") from None


def changed(arguments: Mapping[str, object]) -> dict[str, object]:
    """Those of ``arguments`` that are settings and are not left at their defaults; a path as its text."""
    plain = {n: os.fspath(v) if isinstance(v, os.PathLike) else v for n, v in arguments.items() if n in _FIELDS}
    return {name: value for name, value in plain.items() if value != _FIELDS[name].default}
