"""Where a model is cut into stages, and what goes from one stage to the next.

torch.fx traces a model: its ``forward`` runs once on placeholders, which record the calls of its modules in their
order. A cut lies before one of those calls; a value that is made before a cut and used behind it crosses it::

    stage 0                    | stage 1                  | stage 2
    x ──► conv ──► relu ─┬──► block1 ──► add ──► pool ──► fc ──►
                         └───────────────►┘
                               |                          |
      crosses:               relu                       pool

The model's inputs are on every rank, so they need not be sent.
"""

from __future__ import annotations

import copy
import inspect
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from lockstep.errors import SettingError

_NAMED = 12  #: so many names of modules stand in an error


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """Where to cut a row into ``parts`` neighbouring runs, none empty, so that the greatest cost of a run is least.

    Returns:
        The first place of each run but the first. Of equally good cuts the one with the shortest runs in front.

    Raises:
        ValueError: for fewer places than parts.
    """
    places = len(costs)
    if not 1 <= parts <= places:
        raise ValueError(f"{places} places cannot be cut into {parts} parts")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[i]: the dearest run if the places from i on are cut into as many parts as rounds have been made.
    best = [sums[places] - sums[i] for i in range(places)]
    ends: list[list[int]] = []  # for each round: where the first of the runs from i on ends
    for made in range(1, parts):
        now, end = [float("inf")] * places, [0] * places
        for i in range(places - made):
            for j in range(i + 1, places - made + 1):
                dearest = max(sums[j] - sums[i], best[j])
                if dearest < now[i]:
                    now[i], end[i] = dearest, j
        best = now
        ends.append(end)
    cuts, place = [], 0
    for end in reversed(ends):
        place = end[place]
        cuts.append(place)
    return cuts


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a graph."""

    graph: fx.Graph  #: of the model's inputs and what crosses into the stage, to what crosses out of it, or the output
    crossing: tuple[str, ...]  #: the values that cross out of it; none for the last stage


def trace(model: nn.Module, within: Sequence[str] = ()) -> fx.Graph:
    """The calls that ``model.forward`` makes in the mode, training or evaluation, in which it is.

    What modules do inside is not traced, but for the model itself, `nn.Sequential`, and those in which
    a module of ``within`` lies.

    Raises:
        SettingError: if what ``forward`` does besides cannot be read, such as a branch on a value.
    """
    name = type(model).__name__
    takes = list(inspect.signature(model.forward).parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in takes):
        raise SettingError(f"strategy=pipeline: {name}.forward takes *args or **kwargs; name each of its inputs")
    given = {p.name: p.default for p in takes if p.default is not p.empty}
    try:
        graph = _Tracer(model, within).trace(model, concrete_args=given)
    except Exception as error:
        raise SettingError(
            f"strategy=pipeline: {name}.forward cannot be cut, since torch.fx cannot follow it ({error}). Write the "
            "model as nn.Sequential, or put what cannot be followed into a module of its own"
        ) from error
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, parameter in zip(placeholders, takes, strict=True):
        if parameter.name in given:  # its value is in the graph; what is left of it checks that it has this value
            for check in list(node.users):
                graph.erase_node(check)
            graph.erase_node(node)
    return graph


def called_modules(graph: fx.Graph) -> list[str]:
    """The names of the modules that ``graph`` calls, in the order of the calls."""
    return [node.target for node in graph.nodes if node.op == "call_module"]


def split_stages(graph: fx.Graph, cuts: Sequence[str]) -> list[Stage]:
    """``graph`` cut before the first call of each module of ``cuts``, or of a module inside of it.

    Raises:
        SettingError: if such a module is not called, or not in this order, or nothing lies between two cuts.
    """
    nodes = list(graph.nodes)
    at = _cut_indices(nodes, cuts)
    free = _on_every_stage(nodes)
    stage_of = {n: sum(place <= i for place in at) for i, n in enumerate(nodes) if n not in free and n.op != "output"}
    last = len(cuts)
    used_in = {n: [last if u.op == "output" else stage_of[u] for u in _real_users(n, free)] for n in stage_of}
    made = []
    for number in range(last + 1):
        incoming = [n for n in stage_of if stage_of[n] < number <= max(used_in[n], default=-1)]
        outgoing = [n for n in stage_of if stage_of[n] <= number < max(used_in[n], default=-1)]
        own = [n for n in nodes if stage_of.get(n) == number]
        made.append(_stage(nodes, own, incoming, outgoing if number < last else None, free))
    return made


def stage_of_tensors(model: nn.Module, graphs: Sequence[Sequence[Stage]]) -> dict[str, int]:
    """The stage in which each parameter and buffer of ``model`` is used, by its name; the first one for those unused.

    Args:
        model: which was traced.
        graphs: its stages, in each mode.

    Raises:
        SettingError: for one that two stages use.
    """
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    used: dict[int, set[int]] = {id(t): set() for _, t in tensors}
    for cut in graphs:
        for number, stage in enumerate(cut):
            for node in stage.graph.nodes:
                for tensor in _tensors_of(model, node):
                    used.setdefault(id(tensor), set()).add(number)
    shared = {name: sorted(used[id(t)]) for name, t in tensors if len(used[id(t)]) > 1}
    if shared:
        name, where = next(iter(shared.items()))
        raise SettingError(
            f"strategy=pipeline: {name} is used in stages {where}, {len(shared)} tensors in all in more than one; each "
            "lies in one stage: cut elsewhere with cut=..., or do not share weights"
        )
    return {name: min(used[id(t)], default=0) for name, t in tensors}


def merge_repeated_calls(names: Sequence[str], costs: Sequence[float]) -> tuple[list[str], list[float]]:
    """Each module once, where it is called first; the cost of a later call is added to the module before it."""
    once: dict[str, float] = {}
    for name, cost in zip(names, costs, strict=True):
        if name in once:
            once[next(reversed(once))] += cost
        else:
            once[name] = cost
    return list(once), list(once.values())


def parameter_counts(model: nn.Module, graph: fx.Graph) -> list[float]:
    """A cost for each of `called_modules`: how many parameters it has."""
    return [float(sum(p.numel() for p in model.get_submodule(name).parameters())) for name in called_modules(graph)]


def measured_times_s(
    model: nn.Module,
    graph: fx.Graph,
    inputs: Sequence[torch.Tensor],
    *,
    repeats: int = 3,
    now: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """A cost for each of `called_modules`: seconds for its forward and backward pass, the shortest of ``repeats``.

    Each is computed where the inputs lie, by a copy: ``model`` need not fit there, and is not changed; nor are the
    random generators.
    """
    with torch.random.fork_rng(devices=[t.device for t in inputs if t.device.type == "cuda"]):
        watch = _Timer(model, graph, inputs[0].device, repeats, now)
        watch.run(*inputs)
    return watch.seconds


class _Tracer(fx.Tracer):
    def __init__(self, model: nn.Module, within: Sequence[str]) -> None:
        super().__init__()
        names = {name for name, _ in model.named_modules()}
        self._open = {".".join(n.split(".")[:i]) for n in within if n in names for i in range(1, n.count(".") + 1)}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether ``m`` is taken as it is."""
        return type(m) is not nn.Sequential and module_qualified_name not in self._open


class _Timer(fx.Interpreter):
    """Measures the time of each module alone: its backward pass ends at its inputs."""

    def __init__(
        self, model: nn.Module, graph: fx.Graph, device: torch.device, repeats: int, now: Callable[[], float]
    ) -> None:
        super().__init__(model, graph=graph)
        self._device = device
        self._repeats = repeats
        self._now = now
        self.seconds: list[float] = []

    def get_attr(self, target: Any, args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
        """What the model holds, where it is needed."""
        value = self.fetch_attr(target)
        return value.detach().to(self._device) if isinstance(value, torch.Tensor) else value

    def call_module(self, target: Any, args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
        """The module's output, without history."""
        module = copy.deepcopy(self.fetch_attr(target)).to(self._device)
        times = []
        for _ in range(1 + self._repeats):  # the first one warms up
            here = tuple(_leaf(a) for a in args)
            named = {name: _leaf(a) for name, a in kwargs.items()}
            start = self._read()
            with torch.enable_grad():
                out = module(*here, **named)
                if isinstance(out, torch.Tensor) and out.requires_grad:
                    leaves = [t for t in (*here, *named.values(), *module.parameters()) if _learns(t)]
                    torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
            times.append(self._read() - start)
        self.seconds.append(min(times[1:]))
        return fx.node.map_aggregate(out, lambda v: v.detach() if isinstance(v, torch.Tensor) else v)

    def _read(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._now()


def _leaf(value: object) -> Any:
    if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
        return value
    # One step away from the leaf, so that modules may overwrite it.
    return value.detach().requires_grad_().clone()


def _learns(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _cut_indices(nodes: Sequence[fx.Node], cuts: Sequence[str]) -> list[int]:
    called = [(i, str(n.target)) for i, n in enumerate(nodes) if n.op == "call_module"]
    names = list(dict.fromkeys(name for _, name in called))
    shown = ", ".join(names[1 : 1 + _NAMED]) + (", ..." if len(names) > 1 + _NAMED else "")
    at = []
    for cut in cuts:
        found = [i for i, name in called if f"{name}.".startswith(f"{cut}.")]
        if not found:
            raise SettingError(f"strategy=pipeline: cut={cut}: forward calls no such module; it calls {shown}")
        at.append(found[0])
    starts = [0, *at]
    for number, (start, cut) in enumerate(zip(starts[1:], cuts, strict=True)):
        if not any(starts[number] <= i < start for i, _ in called):
            raise SettingError(
                f"strategy=pipeline: cut={'+'.join(cuts)}: no module is called before {cut} in stage {number}; name "
                f"modules in the order of their calls, of {shown}"
            )
    return at


def _on_every_stage(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """What every stage has or computes itself: inputs, their items, shapes, what is computed of these; parameters."""
    data: set[fx.Node] = set()
    numbers: set[fx.Node] = set()
    parameters: set[fx.Node] = set()
    for node in nodes:
        origins = set(node.all_input_nodes)
        if node.op == "placeholder":
            data.add(node)
        elif node.op == "get_attr":
            parameters.add(node)
        elif not origins or not origins <= data | numbers:
            continue
        elif _is_shape(node) or (origins <= numbers and _is_operator(node)):
            numbers.add(node)
        elif node.target is operator.getitem:
            data.add(node)
    return data | numbers | parameters


def _is_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    return node.target is getattr and node.args[1] in ("shape", "device", "dtype", "ndim")


def _is_operator(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__module__", "") == operator.add.__module__


def _real_users(node: fx.Node, free: set[fx.Node]) -> list[fx.Node]:
    return [user for user in node.users if user not in free]


def _stage(
    nodes: Sequence[fx.Node],
    own: Sequence[fx.Node],
    incoming: Sequence[fx.Node],
    outgoing: Sequence[fx.Node] | None,
    free: set[fx.Node],
) -> Stage:
    graph = fx.Graph()
    here: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.op == "placeholder":
            here[node] = graph.placeholder(node.name)
    for node in incoming:
        here[node] = graph.placeholder(f"{node.name}_in")

    def copied(node: fx.Node) -> fx.Node:
        if node not in here and node in free:
            here[node] = graph.node_copy(node, copied)
        return here[node]

    for node in own:
        here[node] = graph.node_copy(node, copied)
    if outgoing is None:
        graph.output(fx.node.map_arg(nodes[-1].args[0], copied))
        return Stage(graph, ())
    graph.output(tuple(copied(node) for node in outgoing))
    return Stage(graph, tuple(node.name for node in outgoing))


def _tensors_of(model: nn.Module, node: fx.Node) -> list[torch.Tensor]:
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return [*module.parameters(), *module.buffers()]
    if node.op == "get_attr":
        path, _, name = str(node.target).rpartition(".")
        value = getattr(model.get_submodule(path), name)
        return [value] if isinstance(value, torch.Tensor) else []
    return []
