"""What a script's training would take and cost elsewhere: each answer an interval, with where its numbers come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from lockstep.errors import PlanError, SettingError
from lockstep.scale.bench_result import Prices
from lockstep.scale.catalogue import Catalogue
from lockstep.scale.links import Link
from lockstep.scale.other_device import MovedProfile, for_ranks, on_gpu, with_micro_batch
from lockstep.scale.scaling_loss import Loss, ScalingLoss, Traits, shipped_loss
from lockstep.scale.simulated_strategy import SimulatedStrategy
from lockstep.scale.simulator import StepTime, alone_s, simulate
from lockstep.scale.step_profile import LinkProfile, StepProfile
from lockstep.scale.systems import System, parse_system
from lockstep.strategy_kinds import read_strategy

_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class PredictionRequest:
    """What is asked: one profile, on these systems, under these strategies."""

    profile: StepProfile
    systems: tuple[System, ...]
    strategies: tuple[SimulatedStrategy, ...]
    catalogue: Catalogue
    weak: bool = False
    up_to: int | None = None  #: ranks; None: as many as each system has
    samples: float | None = None  #: of the whole training; None: as the profile says, if it does
    prices: Prices = field(default_factory=Prices)
    loss: ScalingLoss | None = None  #: what published systems lose beyond the simulator; None: leave it out
    link: LinkProfile | None = None  #: measured, and taken for systems of the profiled device


@dataclass(frozen=True, slots=True)
class Estimate:
    """One row: so many ranks of a system under a strategy. The interval holds nine cases of ten, as far as known."""

    system: str
    gpu: str
    nodes: int
    strategy: str
    ranks: int
    step: StepTime
    global_batch: float
    efficiency: float  #: against as many single devices of the kind
    speed_up: float
    single_s: float  #: a step of one device of the kind
    total_s: float | None
    total_low_s: float | None
    total_high_s: float | None
    gpu_hours: float | None
    cost: float | None
    needs_bytes: float  #: parameters, gradients and optimizer of a rank
    fits: bool
    sources: tuple[str, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """As a row of JSON."""
        held = asdict(self)
        step = held.pop("step")
        transfers = step.pop("transfers")
        return {**held, "step_s": step.pop("seconds"), **{f"step_{k}": v for k, v in step.items()}} | {
            "transfers": len(transfers)
        }


def predict(request: PredictionRequest) -> tuple[list[Estimate], list[str]]:
    """Every system at 1, 2, 4 ... ranks under every strategy; returns notes on what cannot be, too. Costs no torch."""
    found: list[Estimate] = []
    notes: list[str] = []
    losses = _losses(request)
    for system in request.systems:
        moved = on_gpu(request.profile, system.gpu, request.catalogue)
        for strategy in request.strategies:
            for ranks in _doublings(request.up_to or system.ranks):
                try:
                    found.append(_estimate(request, system, moved, strategy, ranks, losses))
                except PlanError as error:
                    notes.append(f"{system.name}, {strategy.spec}, {ranks} ranks: {error}")
    return list({(one.system, one.strategy, one.ranks): one for one in found}.values()), list(dict.fromkeys(notes))


def side_by_side(before: PredictionRequest, after: PredictionRequest) -> list[tuple[Estimate, Estimate | None]]:
    """Each system and strategy at its most ranks, with as many ranks of what ``after`` has in its place, if it can."""
    ours, theirs = before.strategies, after.strategies
    found: list[tuple[Estimate, Estimate | None]] = []
    for system, changed in zip(before.systems, after.systems, strict=True):
        for number, strategy in enumerate(ours):
            instead = theirs[number] if len(ours) == len(theirs) else theirs[0]
            old, _ = predict(replace(before, systems=(system,), strategies=(strategy,)))
            new, _ = predict(replace(after, systems=(changed,), strategies=(instead,)))
            if old:
                found.append((old[-1], next((one for one in new if one.ranks == old[-1].ranks), None)))
    return found


def _doublings(most: int) -> list[int]:
    found = [1 << power for power in range(most.bit_length())]
    return found if found[-1] == most else [*found, most]


def _estimate(
    request: PredictionRequest,
    kind: System,
    moved: MovedProfile,
    strategy: SimulatedStrategy,
    ranks: int,
    losses: Mapping[_Size, Loss],
) -> Estimate:
    system = _measured(kind.of_ranks(ranks, kind.gpus_per_node), request)
    constants = shipped_loss().constants
    likely, fast, slow = (
        for_ranks(profile, system.ranks, share, weak=request.weak)
        for profile, share in (
            (moved.likely, constants.fixed_share),
            (moved.fast, constants.fixed_share_least),
            (moved.slow, constants.fixed_share_most),
        )
    )
    step = simulate(likely, system, strategy)
    if fast != slow:
        low, high = simulate(fast, system, strategy).low, simulate(slow, system, strategy).high
        step = replace(step, low=min(step.low, low), high=max(step.high, high))
    if loss := losses.get(_size(system)):
        step = _lengthened(step, loss)
    whole = moved.likely
    single = alone_s(whole) / (whole.micro_batches * whole.micro_batch)  # seconds of a sample
    rate = 1 / single
    samples = request.samples or _samples(request.profile)
    hours = [
        None if samples is None else samples / step.samples * seconds for seconds in (step.seconds, step.low, step.high)
    ]
    price = request.prices.of(system.gpu.name)
    gpu_hours = None if hours[0] is None else hours[0] / _HOUR * system.ranks
    needs = _needed_bytes(request.profile, strategy, system)
    return Estimate(
        system=system.name,
        gpu=system.gpu.name,
        nodes=system.nodes,
        strategy=strategy.spec,
        ranks=system.ranks,
        step=step,
        global_batch=step.samples,
        efficiency=step.samples_per_s / rate / system.ranks,
        speed_up=step.samples_per_s / rate,
        single_s=alone_s(whole),
        total_s=hours[0],
        total_low_s=hours[1],
        total_high_s=hours[2],
        gpu_hours=gpu_hours,
        cost=None if price is None or gpu_hours is None else price * gpu_hours,
        needs_bytes=needs,
        fits=needs <= system.gpu.memory_bytes,
        sources=_sources(request, system),
        notes=(*moved.notes, *step.notes),
    )


def _measured(system: System, request: PredictionRequest) -> System:
    """With the link that was measured, where the system is of the device on which it was."""
    profile, link = request.profile, request.link
    own = request.catalogue.find_gpu(profile.device) or request.catalogue.gpu("cpu")
    if link is None or own.name != system.gpu.name:
        return system
    if link.nodes == 1:
        return replace(system, within=Link.measured(link, "within"))
    each = link.ranks // link.nodes
    within_s = system.within.floor_s(each) if each > 1 else 0.0
    return replace(system, between=Link.measured(link, "between", within_s=within_s))


_Size = tuple[str, int, int]


def _size(system: System) -> _Size:
    return (system.gpu.name, system.ranks, system.nodes)


def _losses(request: PredictionRequest) -> dict[_Size, Loss]:
    """What published systems lose beyond what is simulated; for GPUs whose link was not measured. All at once."""
    if request.loss is None:
        return {}
    asked: dict[_Size, Traits] = {}
    for kind in request.systems:
        for ranks in _doublings(request.up_to or kind.ranks):
            system = _measured(kind.of_ranks(ranks, kind.gpus_per_node), request)
            known = system.link.name.startswith("measured") or system.gpu.name == "cpu"
            if system.ranks > 1 and not known:
                asked[_size(system)] = _traits(request.profile, system)
    return dict(zip(asked, request.loss.predict(list(asked.values())), strict=True)) if asked else {}


def _traits(profile: StepProfile, system: System) -> Traits:
    return Traits(
        source="",
        framework="",
        unit="",
        precision="half" if profile.precision in ("fp16", "bf16") else "fp32",
        gpu=system.gpu.name.split("-")[0],
        model="",
        run="",
        parameters=profile.parameter_bytes / 4 or None,
        rate=1.0,
        accumulation=float(profile.micro_batches),
        ranks=system.ranks,
        nodes=system.nodes,
        base_ranks=1,
        base_nodes=1,
        simulated=0.0,
    )


def _lengthened(step: StepTime, loss: Loss) -> StepTime:
    longer = step.seconds * math.exp(max(0.0, loss.median))
    return replace(
        step,
        seconds=longer,
        low=step.low * math.exp(max(0.0, loss.low)),
        high=max(longer, step.high * math.exp(max(0.0, loss.high))),
        parts={**step.parts, "unexplained": longer - step.seconds},
    )


def _samples(profile: StepProfile) -> float | None:
    steps = profile.training_steps
    if steps is None and profile.steps_per_epoch is not None and profile.epochs is not None:
        steps = profile.steps_per_epoch * profile.epochs
    return None if steps is None else float(steps * profile.global_batch)


def _needed_bytes(profile: StepProfile, strategy: SimulatedStrategy, system: System) -> float:
    """Of a rank: parameters, gradients, optimizer; activations come on top."""
    gradients = sum(gradient.bytes for gradient in profile.gradients)
    kind, options = read_strategy(strategy.spec)
    parts = getattr(options, kind.divided_by, 0) or (system.gpus_per_node if kind.within_node else system.ranks)
    held = {"parameters": profile.parameter_bytes, "gradients": gradients, "optimizer": profile.optimizer_bytes}
    return sum(size / (parts if name in (kind.divides or ()) else 1) for name, size in held.items())


def _sources(request: PredictionRequest, system: System) -> tuple[str, ...]:
    profile = request.profile
    found = [f"profile: {profile.steps} steps of {profile.script} on {profile.device}", f"GPU: {system.gpu.source}"]
    if system.ranks > 1 and system.gpus_per_node > 1:
        found.append(f"link {system.within.name}: {system.within.source}")
    if system.nodes > 1:
        found.append(f"link {system.between.name}: {system.between.source}")
    if request.loss is not None and system.ranks > 1:
        found.append(f"what published systems lose: {request.loss.origin} ({request.loss.date})")
    return tuple(found)


# What to choose ----------------------------------------------------------------------------------------------------


def cheapest_within(estimates: Sequence[Estimate], deadline_s: float) -> Estimate | None:
    """The one that costs least of those that fit and end in time: cost, else GPU-hours; None if there is none."""
    in_time = [one for one in estimates if one.fits and one.total_s is not None and one.total_s <= deadline_s]
    priced = [one for one in in_time if one.cost is not None]
    return min(priced or in_time, key=lambda one: (one.cost or one.gpu_hours or 0.0, one.total_s or 0.0), default=None)


def fastest_within(estimates: Sequence[Estimate], budget: float) -> Estimate | None:
    """The one that ends first of those that fit and cost no more; None if there is none.

    Raises:
        SettingError: if no cost is known.
    """
    priced = [one for one in estimates if one.cost is not None]
    if not priced:
        raise SettingError(
            "a budget needs prices: [prices] in lockstep.toml, such as A100 = 2.5, and how long to train"
        )
    affordable = [one for one in priced if one.fits and (one.cost or 0.0) <= budget]
    return min(affordable, key=lambda one: one.total_s or 0.0, default=None)


def waterfall(estimate: Estimate) -> list[tuple[str, float]]:
    """Why not n times as fast: from n down to the speed-up, what each cause takes of it; the sum is the speed-up."""
    step = estimate.step
    steps: list[tuple[str, float]] = [("ideal", float(estimate.ranks))]
    lost = estimate.ranks - estimate.speed_up
    causes = {part: seconds for part, seconds in step.parts.items() if part in _CAUSES and seconds > 0}
    rest = step.seconds * (1 - estimate.efficiency) - sum(causes.values())
    if abs(rest) > 1e-9 * step.seconds:
        # What each rank does that is not divided, such as the optimizer's step, or takes longer in small batches.
        causes["undivided"] = rest
    whole = sum(causes.values())
    for part, seconds in sorted(causes.items(), key=lambda item: -item[1]):
        steps.append((part, -lost * seconds / whole if whole else 0.0))
    return steps


_CAUSES = ("communication", "compression", "waiting", "bubbles", "input", "fixed", "unexplained")


# What if -----------------------------------------------------------------------------------------------------------


def what_if(request: PredictionRequest, text: str) -> PredictionRequest:
    """``request`` with what ``text`` changes, such as ``bucket=5,link=100gbe,batch=64``.

    Raises:
        SettingError: for a word or a value that cannot be used, with those that can.
    """
    changed = request
    for word in text.split(","):
        name, equals, value = word.strip().partition("=")
        if not equals or name not in _CHANGES:
            raise SettingError(f"--what-if {text}: {word.strip() or 'nothing'} is none of {'=, '.join(_CHANGES)}=")
        changed = _CHANGES[name](changed, value)
    return changed


def _bucket(request: PredictionRequest, value: str) -> PredictionRequest:
    limit = _positive("bucket", value) * 2**20
    return replace(request, strategies=tuple(replace(one, bucket_bytes=limit) for one in request.strategies))


def _link(request: PredictionRequest, value: str) -> PredictionRequest:
    def changed(system: System) -> System:
        link = request.catalogue.link(
            value, system.link.name if system.link.name in request.catalogue.links else "10gbe"
        )
        return replace(system, within=link) if link.place == "within" else replace(system, between=link)

    return replace(request, systems=tuple(map(changed, request.systems)), link=None)


def _batch(request: PredictionRequest, value: str) -> PredictionRequest:
    samples = round(_positive("batch", value))
    profile = with_micro_batch(request.profile, max(1, samples), shipped_loss().constants.fixed_share)
    return replace(request, profile=replace(profile, global_batch=profile.micro_batch * profile.micro_batches))


def _strategy(request: PredictionRequest, value: str) -> PredictionRequest:
    first = request.strategies[0]
    parsed = SimulatedStrategy.parse(value.replace("+", ","), reduction=first.reduction)
    return replace(request, strategies=(replace(parsed, bucket_bytes=first.bucket_bytes),))


def _reduction(request: PredictionRequest, value: str) -> PredictionRequest:
    if value not in ("exact", "fast"):
        raise SettingError(f"--what-if reduction={value}: give exact or fast")
    return replace(request, strategies=tuple(replace(one, reduction=value) for one in request.strategies))  # type: ignore[arg-type]


def _gpu(request: PredictionRequest, value: str) -> PredictionRequest:
    def changed(system: System) -> System:
        other = parse_system(f"{system.nodes}x{system.gpus_per_node}x{value}", request.catalogue)
        return replace(system, gpu=other.gpu, within=other.within, between=other.between)

    return replace(request, systems=tuple(map(changed, request.systems)))


def _input(request: PredictionRequest, value: str) -> PredictionRequest:
    rate = _positive("input", value)
    return replace(request, systems=tuple(replace(one, node_samples_per_s=rate) for one in request.systems))


def _positive(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise SettingError(f"--what-if {name}={value}: give a number above 0")
    return number


_CHANGES: Mapping[str, Callable[[PredictionRequest, str], PredictionRequest]] = {
    "bucket": _bucket,
    "link": _link,
    "batch": _batch,
    "strategy": _strategy,
    "reduction": _reduction,
    "gpu": _gpu,
    "input": _input,
}
