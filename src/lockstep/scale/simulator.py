"""A step on any system, from a profile of one device: a pure function, without torch.

    T_1 = M (data + forward + backward) + optimizer + other          M micro-batches on each rank
    T_n = T_1 + exposed communication + waiting for the slowest + what the strategy adds + a fixed term

What a strategy exposes is simulated with two lanes (`TwoLanes`): buckets or blocks move while later ones are computed.
Formulas and their sources are in docs/scale.md.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Final

from lockstep.errors import PlanError
from lockstep.scale.links import Link
from lockstep.scale.simulated_strategy import SimulatedStrategy
from lockstep.scale.step_profile import Bucket, GradientReady, StepProfile, buckets_of
from lockstep.scale.systems import System
from lockstep.strategy_kinds import kind_of

_MOST_BLOCKS: Final = 48  #: that fsdp gathers one after another, where the profile does not say
#: How often PowerSGD goes over a gradient: adds what was left out, two products, subtracts; and once for each rank.
_POWERSGD_PASSES: Final = 4


#: What a step consists of, in the order of a waterfall: the first four are those of one device.
PARTS: Final = (
    *("data", "forward", "backward", "optimizer", "other"),
    *("communication", "compression", "waiting", "bubbles", "input", "fixed"),
)


@dataclass(frozen=True, slots=True)
class StepTime:
    """One optimizer step on a system, in seconds; `low` and `high` hold it in nine cases of ten, as far as known."""

    ranks: int
    seconds: float
    low: float
    high: float
    parts: Mapping[str, float]  #: of `PARTS`, each with its seconds; their sum is `seconds`
    sent_bytes: float  #: by the busiest rank
    samples: float  #: of the step, over all ranks
    transfers: tuple[tuple[float, float], ...] = ()  #: begin and end of each within the step
    notes: tuple[str, ...] = ()

    @property
    def samples_per_s(self) -> float:
        """Throughput over all ranks."""
        return self.samples / self.seconds


@dataclass(frozen=True, slots=True)
class StrategyCost:
    """What a strategy adds to the step of one device."""

    added: Mapping[str, float]
    sent_bytes: float
    transfers: tuple[tuple[float, float], ...] = ()
    notes: tuple[str, ...] = ()
    synchronous: float = 1.0  #: how often in a step all ranks wait for each other
    replicas: int | None = None  #: that compute batches of their own; None: each rank does


def simulate(profile: StepProfile, system: System, strategy: SimulatedStrategy) -> StepTime:
    """One optimizer step of ``profile``'s script on ``system``, each rank computing what the profiled device did.

    On one rank it is the profile's own median. The interval is that of links (their `error`), of the measured
    variation, and of what is known to be left out; `low` and `high` are no bounds.

    Raises:
        PlanError: if the system has too few ranks for the strategy.
    """
    middle = _step(profile, system, strategy)
    if system.ranks == 1:
        spread = 1.645 * _cv(profile) / math.sqrt(max(profile.steps, 1))
        return replace(middle, low=middle.seconds * (1 - spread), high=middle.seconds * (1 + spread))
    fast = replace(system, within=_within_error(system.within, 1), between=_within_error(system.between, 1))
    fast = replace(fast, fixed_s=0.0)
    slow = replace(
        system,
        within=_within_error(system.within, -1),
        between=_within_error(system.between, -1),
        fixed_s=2 * system.fixed_s,
        contention=1.5 * system.contention,
    )
    # How much of the variation ranks share, so that nobody waits for it, is not known.
    low = _step(profile, fast, strategy).seconds - 0.5 * middle.parts["waiting"]
    high = _step(profile, slow, strategy).seconds + 0.5 * middle.parts["waiting"]
    return replace(middle, low=min(low, middle.seconds), high=max(high, middle.seconds))


def alone_s(profile: StepProfile) -> float:
    """Seconds of a step on one device."""
    passes = profile.data.median_s + profile.forward.median_s + profile.backward.median_s
    return profile.micro_batches * passes + profile.optimizer.median_s + profile.other.median_s


def _within_error(link: Link, sign: int) -> Link:
    return link.scaled((1 + link.error) ** sign)


def _step(profile: StepProfile, system: System, strategy: SimulatedStrategy) -> StepTime:
    n, passes = system.ranks, profile.micro_batches
    outcome = StrategyCost({}, 0.0, synchronous=0.0) if n == 1 else _cost(profile, system, strategy)
    parts = dict.fromkeys(PARTS, 0.0)
    parts["data"] = passes * profile.data.median_s
    parts["forward"] = passes * profile.forward.median_s
    parts["backward"] = passes * profile.backward.median_s
    parts["optimizer"] = profile.optimizer.median_s
    parts["other"] = profile.other.median_s
    for part, seconds in outcome.added.items():
        parts[part] += seconds
    samples = passes * profile.micro_batch * (n if outcome.replicas is None else outcome.replicas)
    if n > 1:
        parts["waiting"] += outcome.synchronous * alone_s(profile) * _cv(profile) * slowest_of(n)
        parts["fixed"] += min(1.0, outcome.synchronous) * system.fixed_s
    limit = system.node_samples_per_s
    if limit is not None:
        parts["input"] += max(0.0, samples / system.nodes / limit - sum(parts.values()))
    seconds = sum(parts.values())
    return StepTime(n, seconds, seconds, seconds, parts, outcome.sent_bytes, samples, outcome.transfers, outcome.notes)


def _cost(profile: StepProfile, system: System, strategy: SimulatedStrategy) -> StrategyCost:
    place = kind_of(strategy.name).cost
    if not place:
        raise PlanError(
            f"strategy {strategy.name} does not say what its steps cost (StrategyKind.cost); measure a step with "
            "lockstep bench"
        )
    try:
        cost = pkgutil.resolve_name(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(f"strategy {strategy.name}: cost={place!r} cannot be loaded: {error}") from error
    found: StrategyCost = cost(profile, system, strategy)
    return found


def _cv(profile: StepProfile) -> float:
    """The variation of a whole step as a part of it: its passes vary one by one."""
    passes = (profile.data, profile.forward, profile.backward)
    variance = profile.micro_batches * sum((timing.cv * timing.median_s) ** 2 for timing in passes)
    variance += sum((timing.cv * timing.median_s) ** 2 for timing in (profile.optimizer, profile.other))
    whole = alone_s(profile)
    return math.sqrt(variance) / whole if whole else 0.0


@lru_cache
def slowest_of(ranks: int) -> float:
    """The expected largest of so many standard normal values, 0 for one: Blom (1958)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


# Replicas ----------------------------------------------------------------------------------------------------------


def ddp(profile: StepProfile, system: System, strategy: SimulatedStrategy) -> StrategyCost:
    """Gradients are summed in buckets while the backward pass goes on, compressed if the options say so."""
    compress = strategy.word("compress", "none")
    if compress == "powersgd":
        return _powersgd(profile, system, strategy)
    wire = 0.5 if compress in ("fp16", "bf16") else 1.0
    traffic = _traffic(profile, system, strategy) * wire
    buckets = buckets_of(profile.gradients, strategy.bucket_bytes, strategy.first_bucket_bytes)
    # A cast reads and writes what it converts, before and after.
    cast = 0.0 if wire == 1 else 3 * sum(b.bytes for b in buckets) / system.gpu.memory_bytes_per_s
    lanes = _overlapped(profile, system, buckets, traffic)
    exposed = max(lanes.computed_s, lanes.moved_s) - profile.backward.median_s
    size = sum(bucket.bytes for bucket in buckets)
    return StrategyCost(
        {"communication": exposed, "compression": cast},
        traffic * _ring(size, system.ranks),
        tuple(lanes.transfers),
    )


def _overlapped(profile: StepProfile, system: System, buckets: Sequence[Bucket], traffic: float) -> TwoLanes:
    """A backward pass from which each bucket is sent once it is ready."""
    lanes, done = TwoLanes(system.contention), 0.0
    for bucket in buckets:
        ready = min(max(bucket.ready_s, done), profile.backward.median_s)
        lanes.move(system.all_reduce_s(bucket.bytes, traffic), lanes.compute(ready - done))
        done = ready
    lanes.compute(profile.backward.median_s - done)
    return lanes


def _traffic(profile: StepProfile, system: System, strategy: SimulatedStrategy) -> float:
    """Bytes of the sum, as a multiple of a ring's."""
    if strategy.reduction == "fast":
        return 1.0
    # The exchange carries each node of the tree that a rank holds; the gather carries the sum once.
    return (_most_nodes(profile.micro_batches, system.ranks) + 1) / 2


@lru_cache(maxsize=4096)
def _most_nodes(each: int, ranks: int) -> int:
    """The most nodes of the reduction tree that a rank with ``each`` of the micro-batches holds."""
    if each & (each - 1) == 0 and ranks & (ranks - 1) == 0:
        return 1

    def nodes(first: int, end: int, start: int, stop: int) -> int:
        if start >= end or stop <= first:
            return 0
        if start <= first and end <= stop:
            return 1
        middle = (first + end) // 2
        return nodes(first, middle, start, stop) + nodes(middle, end, start, stop)

    whole = each * ranks
    some = range(ranks) if ranks <= 64 else range(0, ranks, ranks // 64)
    return max(nodes(0, whole, rank * each, (rank + 1) * each) for rank in some)


def _powersgd(profile: StepProfile, system: System, strategy: SimulatedStrategy) -> StrategyCost:
    rank = strategy.number("rank", 1)
    sent = float(sum(_low_rank_bytes(gradient, rank) for gradient in profile.gradients))
    whole = sum(gradient.bytes for gradient in profile.gradients)
    compressing = (_POWERSGD_PASSES + 2 * rank) * whole / system.gpu.memory_bytes_per_s
    # Two exchanges one after the other: q cannot be computed before p is summed.
    moving = 2 * system.all_reduce_s(sent / 2)
    return StrategyCost(
        {"communication": moving, "compression": compressing},
        _ring(sent, system.ranks),
        ((profile.backward.median_s, profile.backward.median_s + moving),),
        ("gradients are taken for square matrices",),
    )


def _low_rank_bytes(gradient: GradientReady, rank: float) -> float:
    numbers = gradient.bytes / 4
    return min(gradient.bytes, 4 * rank * 2 * math.sqrt(numbers))


def zero(profile: StepProfile, system: System, strategy: SimulatedStrategy) -> StrategyCost:
    """Gradients are summed as under ddp, each rank steps its own parameters, and sends them to all."""
    if strategy.number("stage", 1) == 2:
        return _sharded(profile, system, system, replace(strategy, options={"reshard": "step"}))
    replicas = ddp(profile, system, replace(strategy, options={}))
    spread = system.half_s(profile.parameter_bytes)
    saved = profile.optimizer.median_s * (1 - 1 / system.ranks)
    added = {**replicas.added, "communication": replicas.added["communication"] + spread, "optimizer": -saved}
    return replace(
        replicas,
        added=added,
        sent_bytes=replicas.sent_bytes + _ring(profile.parameter_bytes, system.ranks) / 2,
    )


# Divided models ----------------------------------------------------------------------------------------------------


def fsdp(profile: StepProfile, system: System, strategy: SimulatedStrategy) -> StrategyCost:
    """Blocks are gathered from all ranks, and their gradients scattered over all ranks."""
    return _sharded(profile, system, system, strategy)


def hsdp(profile: StepProfile, system: System, strategy: SimulatedStrategy) -> StrategyCost:
    """Blocks are gathered within a node, and gradients summed between nodes, too."""
    shard = int(strategy.number("shard", 0)) or system.gpus_per_node
    if system.ranks % shard:
        raise PlanError(
            f"hsdp: {system.ranks} ranks cannot be divided into copies of {shard} ranks; give a shard= that divides "
            "them"
        )
    inner = system.of_ranks(shard, min(shard, system.gpus_per_node))
    sharded = _sharded(profile, system, inner, strategy)
    copies = system.ranks // shard
    if copies == 1:
        return sharded
    outer = system.across_nodes if system.nodes > 1 else system.of_ranks(copies, copies)
    part = sum(gradient.bytes for gradient in profile.gradients) / shard
    # Each of the ranks of a node sums its own part with its like on the other nodes, all through the node's adapters.
    size = part * (shard if system.nodes > 1 else 1)
    between = outer.all_reduce_s(size)
    hidden = max(0.0, profile.backward.median_s - sharded.transfers[-1][0]) if sharded.transfers else 0.0
    added = {**sharded.added, "communication": sharded.added["communication"] + max(0.0, between - hidden)}
    return replace(sharded, added=added, sent_bytes=sharded.sent_bytes + _ring(part, copies))


def _sharded(profile: StepProfile, system: System, inner: System, strategy: SimulatedStrategy) -> StrategyCost:
    """Blocks are gathered for the forward pass, again for the backward pass, and their gradients scattered."""
    if inner.ranks == 1:
        return ddp(profile, system, replace(strategy, name="ddp", options={}))
    wire = 1.0 if strategy.word("mixed", "none") == "none" else 0.5
    blocks = list(reversed(_blocks(profile)))  # in the order of the forward pass
    again = strategy.word("reshard", "true") == "true"
    gathers = [inner.half_s(block.bytes * wire) for block in blocks]
    scatters = [inner.half_s(block.bytes) for block in blocks]
    share = [block.bytes / max(1, sum(b.bytes for b in blocks)) for block in blocks]
    lanes = TwoLanes(inner.contention)
    for first_pass in (True, False):
        order = range(len(blocks)) if first_pass else range(len(blocks) - 1, -1, -1)
        seconds = (profile.forward if first_pass else profile.backward).median_s
        began = lanes.computed_s  # when the block before this one did
        for number in order:
            # A block is gathered while the one before it is computed.
            there = lanes.move(gathers[number], began) if first_pass or again else 0.0
            began = max(lanes.computed_s, there)
            computed = lanes.compute(seconds * share[number], there)
            if not first_pass:
                lanes.move(scatters[number], computed)
    passes = profile.forward.median_s + profile.backward.median_s
    exposed = max(lanes.computed_s, lanes.moved_s) - passes
    size = sum(block.bytes for block in blocks)
    rounds = profile.micro_batches
    # Every micro-batch gathers; only the last one scatters.
    gathering = sum(gathers) * (2 if again else 1)
    earlier = max(0.0, gathering - passes) + gathers[0]
    added = {"communication": exposed + (rounds - 1) * earlier}
    added["optimizer"] = -profile.optimizer.median_s * (1 - 1 / inner.ranks)
    gathered_bytes = (2 if again else 1) * rounds * size * wire
    sent = (gathered_bytes + size) * (inner.ranks - 1) / inner.ranks
    return StrategyCost(added, sent, tuple(lanes.transfers))


def _blocks(profile: StepProfile) -> list[Bucket]:
    """Neighbouring gradients, at most so many blocks of about the same size."""
    size = sum(gradient.bytes for gradient in profile.gradients)
    return buckets_of(profile.gradients, max(1.0, size / _MOST_BLOCKS))


# Ranks that step by themselves -----------------------------------------------------------------------------------


def local_sgd(profile: StepProfile, system: System, strategy: SimulatedStrategy) -> StrategyCost:
    """Parameters are averaged over all ranks every ``period`` steps, after the step."""
    period = max(1.0, strategy.number("period", 8))
    size = profile.parameter_bytes
    if strategy.word("moments", "keep") == "average":
        size += profile.optimizer_bytes
    moving, sent = system.all_reduce_s(size) / period, _ring(size, system.ranks) / period
    node_period = strategy.number("node_period", 0)
    if node_period and system.nodes > 1:
        moving += system.node_only.all_reduce_s(size) * (1 / node_period - 1 / period)
    # Over a period the variation of single steps averages out.
    return StrategyCost({"communication": moving}, sent, synchronous=1 / math.sqrt(period))


def diloco(profile: StepProfile, system: System, strategy: SimulatedStrategy) -> StrategyCost:
    """Fragments of the parameters are exchanged in each ``period``, behind the next steps if ``overlap`` says so."""
    period = max(1.0, strategy.number("period", 100))
    fragments = max(1.0, strategy.number("fragments", 1))
    overlap = strategy.number("overlap", 0)
    wire = 0.5 if strategy.word("wire", "fp32") in ("bf16", "fp16") else 1.0
    size = profile.parameter_bytes * wire
    moving = system.all_reduce_s(size / fragments)
    hidden = overlap * alone_s(profile)
    last = 0.0  # what cannot be hidden in the backward pass: the layer that it ends with
    if strategy.within_backward and profile.gradients:
        hidden += profile.backward.median_s * (1 - 1 / len(profile.gradients))
        last = 0.0 if overlap else moving / len(profile.gradients)
    exposed = max(last, moving - hidden)
    # The link is one: what is sent in a period takes its time, however well it is hidden.
    exposed = max(exposed * fragments, moving * fragments - period * alone_s(profile))
    return StrategyCost(
        {"communication": exposed / period}, _ring(size, system.ranks) / period, synchronous=1 / math.sqrt(period)
    )


# Other worlds ----------------------------------------------------------------------------------------------------


def dp(profile: StepProfile, system: System, strategy: SimulatedStrategy) -> StrategyCost:
    """One process: it loads for all GPUs, copies the model to each, and adds their gradients up on the first one."""
    if system.nodes > 1:
        raise PlanError(f"dp runs in one process, and the system has {system.nodes} nodes; give one node, or use ddp")
    n, size = system.ranks, sum(gradient.bytes for gradient in profile.gradients)
    copying = (n - 1) * (profile.parameter_bytes + size) / system.within.bytes_per_s
    loading = (n - 1) * profile.micro_batches * profile.data.median_s
    passes = profile.micro_batches
    return StrategyCost(
        {"communication": passes * copying, "input": loading}, passes * (n - 1) * profile.parameter_bytes
    )


def parameter_server(profile: StepProfile, system: System, strategy: SimulatedStrategy) -> StrategyCost:
    """Workers push gradients to the servers, which send parameters back."""
    servers = max(1, int(strategy.number("servers", 1)))
    workers = system.ranks - servers
    if workers < 1:
        raise PlanError(
            f"parameter-server: {servers} servers of {system.ranks} ranks leave no worker; give fewer servers="
        )
    size = sum(gradient.bytes for gradient in profile.gradients)
    busiest = max(float(size), size * workers / servers)
    moving = 2 * system.move_s(busiest)  # gradients one way, parameters the other
    if strategy.word("mode", "sync") == "async":
        # A worker waits for its own; a server's link is busy with everybody's.
        own = 2 * system.move_s(size)
        moving = max(own, moving - alone_s(profile))
    outcome = StrategyCost({"communication": moving}, busiest)
    # Servers compute nothing.
    return replace(outcome, replicas=workers, notes=(f"{workers} of {system.ranks} ranks compute",))


def pipeline(profile: StepProfile, system: System, strategy: SimulatedStrategy) -> StrategyCost:
    """Stages compute one after another, so that each waits for the first and the last micro-batches of a step."""
    stages = int(strategy.number("stages", 0)) or system.ranks
    if system.ranks % stages:
        raise PlanError(
            f"pipeline: {system.ranks} ranks cannot be divided by {stages} stages; give stages= that divides them"
        )
    chunks = max(1, int(strategy.number("chunks", 0)) or 1)
    replicas, rounds = system.ranks // stages, profile.micro_batches
    whole = alone_s(profile)
    computing = whole / stages
    bubbles = computing * (stages - 1) / (rounds * chunks)
    added = {"bubbles": bubbles - (whole - computing)}
    sent = 0.0
    if replicas > 1:
        size = sum(gradient.bytes for gradient in profile.gradients) / stages
        outer = system.of_ranks(replicas, min(replicas, system.gpus_per_node))
        added["communication"] = outer.all_reduce_s(size)
        sent = _ring(size, replicas)
    note = "activations between stages are left out: a profile does not hold their sizes"
    return StrategyCost(added, sent, replicas=replicas, notes=(note,))


def none(profile: StepProfile, system: System, strategy: SimulatedStrategy) -> StrategyCost:
    """Refused: there is no such step on several ranks."""
    raise PlanError(f"strategy none is for one rank, and the system has {system.ranks}; use ddp")


def _ring(size: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-reduce."""
    return 2 * (ranks - 1) / ranks * size


@dataclass(slots=True)
class TwoLanes:
    """Computation and communication side by side: two lanes, each with one piece of work at a time, in its order.

    A schedule as it grows: works are added in the order in which they would be started. While data moves, computation
    may be slower by a factor: gloo's threads and the script share processors, NCCL's kernels share multiprocessors.
    Where it is not slower, this is the bucket queue of DDP:

        e_k = max(e_{k-1}, r_k) + T(S_k)    the k-th exchange ends: after the one before it, and not before it is ready
    """

    contention: float = 0.0  #: how much longer computation takes while data is moving, as a part of it
    computed_s: float = 0.0  #: when the computation so far ends
    moved_s: float = 0.0  #: when the communication so far ends
    transfers: list[tuple[float, float]] = field(default_factory=list)  #: begin and end of each
    _seen: int = 0

    def compute(self, seconds: float, after: float = 0.0) -> float:
        """Compute for ``seconds``, not before ``after``; returns when it ends."""
        now, left = max(self.computed_s, after), seconds
        while self.contention and left > 0:
            while self._seen < len(self.transfers) and self.transfers[self._seen][1] <= now:
                self._seen += 1
            if self._seen == len(self.transfers):
                break
            begin, end = self.transfers[self._seen]
            free = max(0.0, begin - now)
            if free >= left:
                break
            now, left = now + free, left - free
            done = min(left, (end - now) / (1 + self.contention))
            now, left = now + done * (1 + self.contention), left - done
        self.computed_s = now + left
        return self.computed_s

    def move(self, seconds: float, after: float = 0.0) -> float:
        """Let data move for ``seconds``, not before ``after``; returns when it has arrived."""
        begin = max(self.moved_s, after)
        self.moved_s = begin + seconds
        if seconds > 0:
            self.transfers.append((begin, self.moved_s))
        return self.moved_s
