"""What everything but a strategy's own code has to know of it; and that of the strategies of this package.

replicated    each rank holds the whole model while a step computes
sharded       parameters are divided between ranks, and a block is gathered while it computes
local         ranks step by themselves and average now and then
served        some ranks serve parameters to others
pipelined     a model is cut into stages
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from lockstep.errors import SettingError
from lockstep.settings import read_options

Divided = Literal["parameters", "gradients", "optimizer"]
"""What a strategy may divide between ranks."""

WHOLE: Final[frozenset[Divided]] = frozenset()  #: of `StrategyKind.divides`: each rank holds everything
EVERYTHING: Final[frozenset[Divided]] = frozenset(("parameters", "gradients", "optimizer"))
#: What ranks of ``ddp`` may send in place of their gradients.
_COMPRESSIONS: Final = ("none", "fp16", "bf16", "powersgd")
#: In what blocks are gathered and computed: as they are stored, or in a lower precision.
_MIXED: Final = ("none", "bf16", "fp16")
_RESHARD: Final = ("true", "false", "step")
_KEEPS_BITS: Final = ("wrap", "reshard", "prefetch", "offload")
#: Formats of what ranks of ``diloco`` exchange.
_WIRES: Final = ("fp32", "bf16", "fp16")
#: How many stages a rank may have under each schedule: at least, and at most.
CHUNKS: Final = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved": (2, 1 << 20),
    "zero-bubble": (1, 1 << 20),
    "zbv": (2, 2),
}
_SAMPLES: Final = ("float32", "int64")


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Of a strategy that has no options."""


@dataclass(frozen=True, slots=True)
class StrategyKind:
    """A strategy, as the launcher, the command line and the predictions know it before any rank starts."""

    name: str  #: the word after ``--strategy``
    #: Of the module with ``open_strategy(context: StrategyContext, options) -> Strategy``; imported by ranks only.
    module: str
    summary: str  #: a few words for ``--help`` and for lists
    #: A frozen dataclass with a default for each field, which refuses by SettingError the values that cannot be used.
    options: type[Any] = NoOptions
    #: Whether a training has the bits of one rank, on any number of ranks, while all options have their defaults.
    same_bits: bool = False
    #: Options that leave these bits alone whatever their value.
    keeps_bits: frozenset[str] = frozenset()
    #: What other libraries call one of ours, in small letters and with hyphens, each with the options that are meant.
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    one_process: bool = False  #: one process computes on all devices, in place of a rank for each

    # For predictions of memory and time -----------------------------------------------------------------------------

    #: What of a model is divided between ranks; None: no formula is known for the memory of a rank.
    divides: frozenset[Divided] | None = None
    #: The option that says between how many ranks, 0 meaning all of them or, with `within_node`, those of a node.
    divided_by: str = ""
    within_node: bool = False
    own_activations: bool = True  #: a rank keeps the activations of one micro-batch at a time, whole
    #: ``package.module:function``, called with a profile, a system and a `SimulatedStrategy`, that returns the
    #: `lockstep.scale.StrategyCost` of a step; empty: the time of a step cannot be predicted.
    cost: str = ""
    not_predicted: frozenset[str] = frozenset()  #: options of which, but for their defaults, no formula is known

    @property
    def option_names(self) -> tuple[str, ...]:
        """In the order in which they are declared."""
        return tuple(field.name for field in fields(self.options))

    def unpredicted(self, options: Mapping[str, str]) -> str:
        """The first of ``options`` of which no formula is known, as it was written; empty without one."""
        defaults, given = self.options(), read_options(f"strategy {self.name}", self.options, options)
        others = (name for name in options if getattr(given, name) != getattr(defaults, name))
        return next((f"{name}={options[name]}" for name in others if name in self.not_predicted), "")


@dataclass(frozen=True, slots=True)
class DpOptions:
    """The options of ``dp``."""

    devices: int = 0  #: among how many a micro-batch is divided; 0: all GPUs, or two threads

    def __post_init__(self) -> None:
        if self.devices < 0:
            raise SettingError(f"strategy dp: devices={self.devices}; give a number from 1")


@dataclass(frozen=True, slots=True)
class DdpOptions:
    """The options of ``ddp``."""

    compress: str = "none"  #: what ranks send: ``fp16``, ``bf16`` or ``powersgd``; the bits depend on their number then
    rank: int = 1  #: of PowerSGD's approximations: more are nearer to the gradient, and more to send
    start: int = 0  #: how many steps go by before PowerSGD begins

    def __post_init__(self) -> None:
        if self.compress not in _COMPRESSIONS:
            raise SettingError(f"strategy ddp: compress={self.compress!r}; give one of {', '.join(_COMPRESSIONS)}")
        if self.rank < 1 or self.start < 0:
            raise SettingError(
                f"strategy ddp: rank={self.rank}, start={self.start}; give a rank from 1 and a start from 0"
            )
        if self.compress != "powersgd" and (self.rank, self.start) != (1, 0):
            raise SettingError(
                f"strategy ddp: rank and start are PowerSGD's, and compress={self.compress}; leave them out, or write "
                "ddp:compress=powersgd"
            )


@dataclass(frozen=True, slots=True)
class ZeroOptions:
    """The options of ``zero``."""

    #: Of ZeRO: 1 divides the state of the optimizer, 2 gradients as well. Parameters are whole while a step computes.
    stage: int = 1

    def __post_init__(self) -> None:
        if self.stage not in (1, 2):
            raise SettingError(f"stage={self.stage}: give 1 or 2; the third stage of ZeRO is the strategy fsdp")


@dataclass(frozen=True, slots=True)
class FsdpOptions:
    """The options of ``fsdp``."""

    #: Which modules are gathered as one: ``auto`` (members of lists of modules), ``whole`` (the model), a least number
    #: of parameters such as ``1M``, names of classes such as ``Block+Head``, or ``package.module:function``.
    wrap: str = "auto"
    #: ``bf16`` or ``fp16``: blocks are gathered and computed in it, with master parameters and sums in fp32. The bits
    #: are the same for any number of ranks, and those of no other strategy. ``fp16`` needs ``precision="fp16"``.
    mixed: str = "none"
    #: When a gathered block is dropped: ``true``, after its forward pass, and it is gathered again for the backward
    #: pass; ``false``, after its backward pass; ``step``, after that of the step's last micro-batch: less traffic, more
    #: memory.
    reshard: str = "true"
    #: Modules whose parameters stay whole on each rank, by class or by name in the model, joined by ``+``.
    ignored_modules: str = ""
    #: How many blocks are gathered ahead of the one that computes; 0: as torch does, one, on GPUs only.
    prefetch: int = 0
    #: Keep parameters, gradients and optimizer state in the memory of the CPU, for models on GPUs.
    offload: bool = False
    #: Keep only the inputs of blocks, and compute their forward pass once more in the backward pass; the same bits.
    checkpoint_activations: bool = False
    #: Neighbouring ranks that compute each layer together, by the plan of ``run.model(..., tensor_plan=...)``.
    tensor: int = 1

    def __post_init__(self) -> None:
        if self.mixed not in _MIXED:
            raise SettingError(f"mixed={self.mixed!r}: give one of {', '.join(_MIXED)}")
        if self.mixed != "none" and self.ignored_modules:
            raise SettingError(
                f"mixed={self.mixed} with ignored_modules={self.ignored_modules}: they would stay fp32 between modules "
                f"in {self.mixed}; use precision='{self.mixed}' without mixed={self.mixed}"
            )
        if self.reshard not in _RESHARD:
            raise SettingError(f"reshard={self.reshard!r}: give one of {', '.join(_RESHARD)}")
        if self.prefetch < 0:
            raise SettingError(f"prefetch={self.prefetch}: give the number of blocks to gather ahead, 0 or more")
        if self.tensor < 1:
            raise SettingError(f"tensor={self.tensor}: give the ranks that compute a layer together, 1 or more")


@dataclass(frozen=True, slots=True)
class HsdpOptions(FsdpOptions):
    """The options of ``hsdp``."""

    #: Ranks that hold one copy of the model, or of a tensor group's part of it; 0: those of a node.
    shard: int = 0

    def __post_init__(self) -> None:
        FsdpOptions.__post_init__(self)
        if self.shard < 0:
            raise SettingError(f"shard={self.shard}: give the ranks that hold a copy, 1 or more")


@dataclass(frozen=True, slots=True)
class LocalSgdOptions:
    """The options of ``local-sgd``."""

    period: int = 8  #: steps between two averages over all ranks
    warmup: int = 0  #: steps at the beginning that are those of ddp
    node_period: int = 0  #: steps between two averages over the ranks of a node; 0: there are none
    moments: str = "keep"  #: of optimizers: keep each rank's own, or average them with the parameters

    def __post_init__(self) -> None:
        if self.period < 1 or self.warmup < 0 or self.node_period < 0:
            raise SettingError(
                f"strategy local-sgd: period={self.period}, warmup={self.warmup}, node_period={self.node_period}; give "
                "a period from 1, and the others from 0"
            )
        if self.node_period and self.period % self.node_period:
            raise SettingError(
                f"strategy local-sgd: node_period={self.node_period} does not divide period={self.period}; give a "
                f"multiple of it, such as period={self.node_period * max(1, round(self.period / self.node_period))}"
            )
        if self.moments not in ("keep", "average"):
            raise SettingError(f"strategy local-sgd: moments={self.moments!r}; give keep or average")


@dataclass(frozen=True, slots=True)
class DilocoOptions:
    """The options of ``diloco``."""

    period: int = 100  #: steps between two exchanges of the same parameters
    outer_lr: float = 0.7  #: learning rate of the outer optimizer
    outer_momentum: float = 0.9  #: its momentum
    fragments: int = 1  #: parts of the parameters, each exchanged at its own time within the period
    overlap: int = 0  #: steps that ranks go on while an exchange is under way
    mix: float = 0.5  #: with overlap, how much of a rank's own parameters stays; 0 drops what it did meanwhile
    wire: str = "fp32"  #: format of what is exchanged: fp32 (as the parameters are), bf16 or fp16

    def __post_init__(self) -> None:
        given = f"strategy diloco: period={self.period}, fragments={self.fragments}, overlap={self.overlap}"
        if self.period < 1 or not 1 <= self.fragments <= self.period:
            raise SettingError(f"{given}; give a period from 1, and from 1 to {max(self.period, 1)} fragments")
        if not 0 <= self.overlap < self.period // self.fragments:
            raise SettingError(
                f"{given}: an exchange begins every {self.period // self.fragments} steps, and the one before must "
                f"have been applied by then; give an overlap from 0 to {self.period // self.fragments - 1}"
            )
        if self.outer_lr <= 0 or not 0 <= self.outer_momentum < 1 or not 0 <= self.mix < 1:
            raise SettingError(
                f"strategy diloco: outer_lr={self.outer_lr:g}, outer_momentum={self.outer_momentum:g}, "
                f"mix={self.mix:g}; give an outer_lr above 0, and from 0 to below 1 for the others"
            )
        if self.wire not in _WIRES:
            raise SettingError(f"strategy diloco: wire={self.wire!r}; give one of {', '.join(_WIRES)}")


@dataclass(frozen=True, slots=True)
class ParameterServerOptions:
    """The options of ``parameter-server``."""

    servers: int = 1  #: how many of the ranks serve, the last ones
    mode: str = "sync"  #: sync: servers wait for all workers; async: they step with each push
    staleness: int | None = None  #: of async: by how many steps a worker may be ahead of the slowest; None: any number

    def __post_init__(self) -> None:
        _check_servers("parameter-server", self.servers)
        if self.mode not in ("sync", "async"):
            raise SettingError(f"strategy parameter-server: mode={self.mode!r}; give sync or async")
        if self.staleness is not None and (self.mode == "sync" or self.staleness < 0):
            raise SettingError(
                f"strategy parameter-server: staleness={self.staleness}, mode={self.mode}; "
                "give a number from 0, with mode=async"
            )


@dataclass(frozen=True, slots=True)
class HybridOptions:
    """The options of ``hybrid``."""

    servers: int = 1  #: how many of the ranks serve, the last ones
    served: str = ""  #: names of the embeddings that lie there, joined by '+'; all of them, if there is none

    def __post_init__(self) -> None:
        _check_servers("hybrid", self.servers)


def _check_servers(strategy: str, servers: int) -> None:
    if servers < 1:
        raise SettingError(f"strategy {strategy}: servers={servers}; give a number from 1")


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """The options of ``pipeline``."""

    stages: int = 0  #: ranks that hold one replica of the model; 0: all ranks
    schedule: str = "1f1b"  #: gpipe, 1f1b, interleaved, zero-bubble or zbv
    chunks: int = 0  #: stages on each rank; 0: two for interleaved and zbv, else one
    cut: str = ""  #: the first module of each stage but the first, as in layer2+layer3+head; empty: balanced
    sample: str = ""  #: shape of a micro-batch by whose times to balance, as in 32x3x224x224 or 8x128:int64

    def __post_init__(self) -> None:
        if self.schedule not in CHUNKS:
            raise SettingError(f"strategy pipeline: schedule={self.schedule!r}; give one of {', '.join(CHUNKS)}")
        if self.stages < 0 or self.chunks < 0:
            raise SettingError(f"strategy pipeline: stages={self.stages}, chunks={self.chunks}; give numbers from 1")
        least, most = CHUNKS[self.schedule]
        if not least <= self.chunks_per_rank <= most:
            raise SettingError(
                f"strategy pipeline: schedule={self.schedule}, chunks={self.chunks}; interleaved is for two chunks or "
                "more, zbv for two, zero-bubble for any number, gpipe and 1f1b for one"
            )
        self.sample_shape()

    @property
    def chunks_per_rank(self) -> int:
        """Stages on each rank."""
        return self.chunks or CHUNKS[self.schedule][0]

    def sample_shape(self) -> tuple[tuple[int, ...], str] | None:
        """Shape and name of the type of `sample`; None without a sample.

        Raises:
            SettingError: if `sample` is neither a shape nor a shape with one of these types.
        """
        shape, _, dtype = self.sample.partition(":")
        numbers = shape.split("x")
        if not self.sample:
            return None
        if (dtype or "float32") not in _SAMPLES or not all(number.isdecimal() for number in numbers):
            raise SettingError(
                f"strategy pipeline: sample={self.sample!r}; give a shape, as in 32x3x224x224, or 8x128:int64 for "
                "indices"
            )
        return tuple(map(int, numbers)), dtype or "float32"


_KINDS: Final = (
    StrategyKind(
        "none",
        "lockstep.strategies.replicated.single_process",
        "one rank alone",
        same_bits=True,
        elsewhere=dict.fromkeys(("single-device", "single"), ""),
        divides=WHOLE,
        cost="lockstep.scale.simulator:none",
    ),
    StrategyKind(
        "dp",
        "lockstep.strategies.replicated.dp",
        "one process divides each micro-batch between all devices",
        DpOptions,
        elsewhere=dict.fromkeys(("data-parallel", "dataparallel"), ""),
        one_process=True,
        divides=WHOLE,
        cost="lockstep.scale.simulator:dp",
    ),
    StrategyKind(
        "ddp",
        "lockstep.strategies.replicated.ddp",
        "each rank holds the model, and gradients are summed",
        DdpOptions,
        same_bits=True,
        elsewhere=dict.fromkeys(
            (
                *("distributed-data-parallel", "distributeddataparallel", "ddp-spawn", "ddp-notebook"),
                *("ddp-find-unused-parameters-true", "horovod", "allreduce", "multi-gpu"),
            ),
            "",
        ),
        divides=WHOLE,
        cost="lockstep.scale.simulator:ddp",
    ),
    StrategyKind(
        "zero",
        "lockstep.strategies.replicated.zero",
        "as ddp, with the state of optimizers divided between ranks",
        ZeroOptions,
        same_bits=True,
        keeps_bits=frozenset(("stage",)),
        elsewhere={
            **dict.fromkeys(("zero1", "zero-1", "deepspeed-stage-1", "shard-optimizer"), ""),
            **dict.fromkeys(("deepspeed", "zero2", "zero-2", "deepspeed-stage-2", "shard-grad-op"), "stage=2"),
        },
        divides=frozenset(("optimizer",)),
        cost="lockstep.scale.simulator:zero",
    ),
    StrategyKind(
        "fsdp",
        "lockstep.strategies.sharded.fully_sharded",
        "parameters, gradients and optimizer state divided between all ranks",
        FsdpOptions,
        same_bits=True,
        keeps_bits=frozenset(_KEEPS_BITS),
        elsewhere=dict.fromkeys(("zero3", "zero-3", "deepspeed-stage-3", "full-shard", "fully-shard", "fsdp2"), ""),
        divides=EVERYTHING,
        cost="lockstep.scale.simulator:fsdp",
        not_predicted=frozenset(("tensor",)),
    ),
    StrategyKind(
        "hsdp",
        "lockstep.strategies.sharded.hybrid_sharded",
        "as fsdp among the ranks of a node, with a copy on each node",
        HsdpOptions,
        same_bits=True,
        keeps_bits=frozenset((*_KEEPS_BITS, "shard")),
        elsewhere=dict.fromkeys(("hybrid-shard", "hybrid-sharded"), ""),
        divides=EVERYTHING,
        divided_by="shard",
        within_node=True,
        cost="lockstep.scale.simulator:hsdp",
        not_predicted=frozenset(("tensor",)),
    ),
    StrategyKind(
        "local-sgd",
        "lockstep.strategies.local.local_sgd",
        "each rank steps by itself, and parameters are averaged every few steps",
        LocalSgdOptions,
        divides=WHOLE,
        cost="lockstep.scale.simulator:local_sgd",
    ),
    StrategyKind(
        "diloco",
        "lockstep.strategies.local.diloco",
        "each rank steps by itself for long, and an outer optimizer takes the mean of the moves",
        DilocoOptions,
        cost="lockstep.scale.simulator:diloco",
    ),
    StrategyKind(
        "parameter-server",
        "lockstep.strategies.parameter_server.parameter_server",
        "the last ranks hold the parameters and step; the others compute gradients",
        ParameterServerOptions,
        same_bits=True,
        keeps_bits=frozenset(("servers",)),
        cost="lockstep.scale.simulator:parameter_server",
    ),
    StrategyKind(
        "hybrid",
        "lockstep.strategies.parameter_server.hybrid",
        "the last ranks hold the embedding tables; the others keep the rest as ddp does",
        HybridOptions,
        same_bits=True,
        keeps_bits=frozenset(("servers",)),
        cost="lockstep.scale.simulator:parameter_server",
    ),
    StrategyKind(
        "pipeline",
        "lockstep.strategies.pipelined.pipeline",
        "each rank holds some layers, and micro-batches go through them one after another",
        PipelineOptions,
        same_bits=True,
        elsewhere=dict.fromkeys(("pp", "gpipe", "1f1b"), ""),
        divides=EVERYTHING,
        divided_by="stages",
        own_activations=False,
        cost="lockstep.scale.simulator:pipeline",
    ),
    StrategyKind(
        "auto",
        "lockstep.strategies.replicated.auto",
        "ddp, zero or fsdp: the first whose parts fit into a GPU",
        divides=WHOLE,
        cost="lockstep.scale.simulator:ddp",
    ),
)
#: The strategies by their words.
BUILT_IN: Final[Mapping[str, StrategyKind]] = {kind.name: kind for kind in _KINDS}
