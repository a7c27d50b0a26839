"""Embeddings on servers, the dense part replicated on workers, and distributed autograd across both.

             worker 0                    worker 1                    servers, each with some rows of the tables
    ids ──────────────────── look-up ──────────────────────────►  rows
    rows ◄───────────────────────────────────────────────────────
    dense part, loss
    backward ─────────────── gradients of the rows ────────────►  added row by row,
                                                                  along the tree by micro-batch
    ◄── the tree's sum of dense gradients ──►                     the tree's sum
    step                        step                              step

Tables that no rank could hold lie on servers, divided by rows, and only the rows that a micro-batch asks for travel,
each once, and their gradients. `torch.distributed.rpc` carries both: each micro-batch is one context of
`torch.distributed.autograd`, whose backward pass goes through workers and servers, and leaves gradients in the context
on either side instead of in ``.grad``. From there they are folded along the tree, so that the bits are those of
``none``: a worker computes the look-up itself, in a small table of the rows that it has been sent.

Distributed autograd adds up the gradients of several look-ups of one row as they arrive. So each look-up has a leaf
of its own there, and the leaves' gradients are added from the last look-up of a forward pass to the first, as autograd
does on one rank. With ``sparse=True`` the result is the same for any number of ranks, but that of ``none`` only up to
rounding: in which order torch adds sparse tensors depends on how their memory is laid out.

The user's optimizer object runs everywhere: on workers it steps the dense part, on servers the tables. Torch's
``DistributedOptimizer`` would make another one on each server, with a state that fits no checkpoint of one rank alone.

Traffic of a micro-batch, with r different rows of d numbers in a look-up: r*d*4 bytes from servers and as many to them;
of a step, an all-reduce of the dense part. ``ddp`` would all-reduce the whole table.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch._C._distributed_autograd import backward, get_gradients  # what torch.distributed exports, with types
from torch.distributed import autograd as dist_autograd

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import open_all_reduce, translating_peer_errors
from lockstep.errors import MismatchError, SettingError, UsageError
from lockstep.strategies.not_whole.absent_parameters import refuse_changes
from lockstep.strategies.not_whole.partial_models import mark_absent, of_absent_parameters, refuse_copies
from lockstep.strategies.parameter_server.embedding_tables import (
    EmbeddingTable,
    EmbeddingTables,
    GradientRequest,
    LookupRequest,
    ServedTable,
)
from lockstep.strategies.parameter_server.flat_buckets import (
    BucketGradients,
    FlatBucket,
    flat_buckets_of,
    set_gradients,
)
from lockstep.strategies.parameter_server.parameter_store import LayoutWithHooks, ParameterStore
from lockstep.strategies.parameter_server.row_division import RowDivision
from lockstep.strategies.parameter_server.rpc import RpcEndpoint, ServerRoles, SyncRound
from lockstep.strategies.parameter_server.served_tables import find_tables, own_rows, place_rest, restore_unserved
from lockstep.strategies.parameter_server.server_context import WITHOUT_GRADIENTS
from lockstep.strategies.parameter_server.table_construction import TablePart, construct
from lockstep.strategies.parts.buffers import Buffers
from lockstep.strategies.parts.gradient_accumulation import (
    ParameterSet,
    begin_total,
    divide_by_counts,
    parameters_of,
    steps_across_elements,
)
from lockstep.strategies.parts.state_layout import OwnerLayout
from lockstep.strategies.replicated.single_process import SingleProcess
from lockstep.strategies.strategy import ReplicaAssignment, ServerStrategy, Strategy, StrategyContext, UpdateShare
from lockstep.strategy_kinds import HybridOptions

_LOOK_UP, _BACKWARD = "a look-up of embeddings", "the backward pass"


def open_strategy(context: StrategyContext, options: HybridOptions) -> Strategy:
    """The strategy ``hybrid``; one rank alone holds everything. Collective.

    Raises:
        SettingError: if no rank would be left to work, or for fp16.
    """
    if context.group.size == 1:
        return SingleProcess(context.group, context.runs, exact=context.exact)
    context.refuse_fp16("hybrid", WITHOUT_GRADIENTS)
    return Hybrid(
        context, ServerRoles(context.group.size, options.servers), tuple(filter(None, options.served.split("+")))
    )


@dataclass(frozen=True, slots=True)
class StepDone:
    """A worker has computed its micro-batches of a step."""

    step: int
    micro_batches: int  #: of the step
    counted: int | None = None  #: items of the step over all workers, where they are counted


class Hybrid(ServerStrategy):
    """The strategy ``hybrid``."""

    divides_construction = True
    update_share = UpdateShare()

    def __init__(self, context: StrategyContext, roles: ServerRoles, served: Sequence[str]) -> None:
        group = context.group
        self._group: Final = group
        self._roles: Final = roles
        self._say: Final = context.say
        self._serves: Final = group.rank in roles.servers
        self.assignment = ReplicaAssignment(None if self._serves else group.rank, len(roles.workers))
        self._names: Final = served
        self._missing: Final = set(served)
        self._division: Final = RowDivision(roles.servers)
        self._tables: Final = EmbeddingTables()
        self._table_of: Final[dict[torch.Tensor, ServedTable]] = {}  # by its parameter, on every rank
        self._used: Final[set[int]] = set()  # tables that had a part in the loss of the micro-batch, by number
        self._endpoint: Final = RpcEndpoint(group, self._read)
        self._round: Final = SyncRound(self._endpoint, roles)
        self._store: Final = ParameterStore(group, self._endpoint)
        self._owner_layout: Final = OwnerLayout(group)
        self.state_layout = LayoutWithHooks(self._owner_layout, self._norm, self._owner_layout.load_model)
        self._role_group: Final = group.subgroup(roles.servers if self._serves else roles.workers)
        self._all_reduce: Final = open_all_reduce(self._role_group, context.runs)
        self._buffers: Final = Buffers(self._all_reduce, self._role_group)
        self._autograd: Final = _AutogradContext()
        self._buckets: dict[ParameterSet, list[FlatBucket]] = {}  # of the dense part
        self._sums: BucketGradients | None = None
        self._in_loop = False
        self._step = 0
        self._closed = False
        if self._serves:
            self._endpoint.watch(roles.workers)

    def construct(self, make: Callable[[], nn.Module]) -> nn.Module:
        """What ``make`` gives; of its embeddings each server has its rows alone, and workers none. Collective.

        The rest is where ``make`` has made it.

        Raises:
            MismatchError: if ranks would draw different random numbers.
        """
        return construct(make, self._division, self._group)

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself, as it is on rank 0; its tables are looked up where they lie. Collective.

        Raises:
            UsageError: if a table cannot lie elsewhere.
        """
        modules = find_tables(model, self._names)
        self._missing.difference_update(modules)
        if not modules:
            self._say(f"{type(model).__name__} has no embedding to serve; ddp would use the servers better")
        restore_unserved(model, modules, self._group)
        place_rest(model, self._group.device)
        tables = {name: _served(module, self._division, self._group.rank) for name, module in modules.items()}
        numbers = {name: self._tables.add(table) for name, table in tables.items()}
        self._store.setup_model(model, lambda _: 0, [module.weight for module in modules.values()])
        for name, table in tables.items():
            if self._serves or isinstance(table.module.weight, TablePart):
                table.keep(own_rows(name, numbers[name], table, self._endpoint, self._group.device))
            self._say(f"{name} {table.shape} is served by {_words(table.rows_of)}")
        self._group.barrier("the rows of tables")
        for name, table in tables.items():
            if not self._serves:
                table.keep(None)
                table.module.forward = functools.partial(self._look_up, numbers[name])  # type: ignore[method-assign]
            if not table.whole_here:
                mark_absent(table.module, ["weight"], "hybrid", shape=table.shape)
            if not self._serves:
                refuse_changes(table.module.weight, f"{name}.weight", lambda: self._in_loop)
            self._table_of[table.module.weight] = table
        # Servers hold their rows of a table; all else all workers do.
        holders = {
            name: tuple(self._table_of[tensor].rows_of) if tensor in self._table_of else self._roles.workers
            for name, tensor in model.state_dict(keep_vars=True).items()
        }
        divided = {f"{name}.weight".lstrip("."): table.shard() for name, table in tables.items() if table.is_divided}
        self._owner_layout.setup_model(model, lambda name: holders[name], divided)
        self._buffers.setup_model(model)
        if tables:
            refuse_copies(model, "hybrid")
        return model

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that ``optimizer`` steps each row of a divided table by itself.

        Raises:
            UsageError: if it is one of torch's that do not, or if the weights to be evaluated depend on its state.
        """
        known = steps_across_elements(optimizer)
        if known and any(p in self._table_of and self._table_of[p].is_divided for p in parameters_of(optimizer)):
            raise UsageError(
                f"{known} updates a row by the values of other rows, and the rows of an embedding are divided between "
                "servers; use another optimizer for it, servers=1, or ddp"
            )
        super().check_optimizer(optimizer)

    def explain(self, error: Exception, method: str) -> str:
        """Where torch speaks of a table whose rows are on servers."""
        return of_absent_parameters("hybrid", error, method)

    def begin_micro_batch(self, position: MicroBatchPosition) -> None:
        """Open a context of distributed autograd, for what this rank computes until `end_micro_batch`."""
        if not self._serves:
            self._in_loop = True
            self._used.clear()
            self._autograd.enter()

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute gradients through workers and servers; those of tables stay on their servers."""
        assert self._autograd.id is not None
        if self._sums is None:
            self._sums = BucketGradients(self._dense(target), position.of, exact=True)
        with translating_peer_errors(_BACKWARD):
            backward(self._autograd.id, [loss if weight is None else loss * weight])
        gradients = get_gradients(self._autograd.id)
        for bucket in self._dense(target):
            for parameter in bucket.tensors:
                parameter.grad = gradients.get(parameter)
        self._sums.accumulate(position)
        if not position.is_padding:
            used = tuple(sorted(self._used))
            take = GradientRequest(self._group.rank, self._autograd.id, position.index, position.of, used)
            for server, answer in [(server, self._endpoint.read(server, take)) for server in self._roles.servers]:
                self._endpoint.wait(server, answer, _BACKWARD)
        if position.last:
            self._round.unsent = dict.fromkeys(self._roles.servers, StepDone(self._step, position.of))
            self._reduce(self._dense(target), self._sums, position.of)
            self._sums = None

    def serve(self, target: ParameterSet, position: MicroBatchPosition) -> bool:
        """Wait for the end of the workers' step, and set ``.grad`` of tables; other threads answer look-ups."""
        if self._round.is_over("the end of the step"):
            self._tables.discard_step()
            return False
        reports: list[StepDone] = self._round.gather("the end of the step")
        if {(done.step, done.micro_batches) for done in reports} != {(self._step, position.of)}:
            raise MismatchError(
                f"workers are done with other steps than this server is in ({self._step}, of {position.of} "
                "micro-batches): " + ", ".join(f"{done.step}, of {done.micro_batches}" for done in reports)
            )
        self._tables.write_gradients(position.of)
        (counted,) = {done.counted for done in reports}
        if counted is not None:
            divide_by_counts(target, position.step_samples, counted)
        return True

    def goes_on(self) -> bool:
        """Whether the loop goes on with the next epoch. Collective."""
        return self._round.goes_on()

    def end_loop(self, *, complete: bool) -> bool:
        """End the loop over micro-batches; whether it was complete. Collective."""
        self._in_loop = False
        return self._round.end_loop(complete=complete)

    def begin_count(self, counted: int) -> Callable[[], int]:
        """Begin to add up the items of all workers. Collective."""
        return begin_total(self._role_group, counted)

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """Divide by the number of items; servers divide once they learn it."""
        divide_by_counts(target, samples, counted)
        self._round.unsent = {rank: replace(done, counted=counted) for rank, done in self._round.unsent.items()}

    def before_optimizer_step(self, target: ParameterSet) -> None:
        """Send servers the message that gradients are in place, if it was not sent yet."""
        self._round.send()

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """After the last micro-batch, wait until the servers have stepped; then bring buffers in step."""
        self._autograd.leave()
        if position.last:
            self._round.answer(lambda: None)
            for _ in self._round.answers("the step of the servers"):
                pass
            self._step += 1
        if not self._serves:
            with translating_peer_errors("the reduction of buffers"):
                self._buffers.end_micro_batch(position)

    def replay(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute gradients through workers and servers, and leave them in a context that is closed after it."""
        assert self._autograd.id is not None
        with translating_peer_errors(_BACKWARD):
            backward(self._autograd.id, [loss if weight is None else loss * weight])

    def end_replay(self) -> None:
        """Restore buffers."""
        self._autograd.leave()
        self._buffers.restore(discards_step=False)

    def discard_step(self) -> None:
        """Drop gradients that were not sent, and restore buffers."""
        self._autograd.leave()
        self._sums, self._round.unsent = None, {}
        self._buffers.restore()

    def resync(self) -> None:
        """Wait until every rank is here; start from the buffers that models hold. Collective.

        A server answers look-ups at any time. Without the wait, a worker that has loaded its part of a checkpoint would
        be given rows of a table whose server has not.

        Raises:
            SettingError: if an embedding that was named is in no model.
        """
        if self._missing:
            raise SettingError(
                f"strategy hybrid: served={'+'.join(sorted(self._missing))} is in no model of this run; give names of "
                "nn.Embedding or nn.EmbeddingBag as in model.named_modules()"
            )
        self._round.rejoin()
        self._group.barrier("the start of the loop over micro-batches")
        self._buffers.resync()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Look-ups within give what tables hold when every rank is here, and none changes them before all have left.

        Collective; where the loop is left by an error or by ``break``, nobody waits at its end.
        """
        self._group.barrier("the start of the evaluation")
        yield
        self._group.barrier("the end of the evaluation")

    def close(self) -> None:
        """End the threads and connections. Collective."""
        self._closed = True
        self._autograd.leave()
        self._all_reduce.close()
        self._endpoint.close()

    def _dense(self, target: ParameterSet) -> list[FlatBucket]:
        """The buckets of the dense part, which workers sum among themselves."""
        if target not in self._buckets:
            if not target.everything:
                raise UsageError(
                    "servers make one update in each step, and this loss is for some of the parameters only; give "
                    "run.step(loss, optimizer=[first, second]) all optimizers at once"
                )
            dense = [p for p in target.parameters if p not in self._table_of]
            self._buckets[target] = flat_buckets_of(dense, [0] * len(dense))
        return self._buckets[target]

    def _reduce(self, buckets: Sequence[FlatBucket], sums: BucketGradients, micro_batches: int) -> None:
        """Set ``.grad`` of the dense part to the sum over all workers; None for what had no part in any loss."""
        with translating_peer_errors("the reduction of gradients"):
            arriving = []
            for number, bucket in enumerate(buckets):
                # Behind it a 1 for each parameter that had a part in some loss: their sum says so to all workers.
                used = bucket.tensors[0].new_zeros(len(bucket.tensors))
                used[sorted(sums.used(number))] = 1
                partials = [torch.cat([row, used]) for row in sums.rows(number)]
                elements = sum(p.numel() for p in bucket.tensors)
                out = bucket.tensors[0].new_empty(elements + len(used))
                self._all_reduce.begin(out, partials, micro_batches)
                arriving.append((bucket, out, elements))
            self._all_reduce.finish()
        for bucket, out, elements in arriving:
            set_gradients(bucket, out[:elements], out[elements:].nonzero().flatten().tolist())

    def _look_up(self, number: int, *inputs: Any, **named: Any) -> torch.Tensor:
        """Look up rows on the server; called in place of the forward pass of a table."""
        if self._closed:
            raise UsageError("an embedding that servers held was looked up after the run was closed; do so within")
        table, context = self._tables.tables[number], self._autograd.id if torch.is_grad_enabled() else None

        def fetch(rows: torch.Tensor) -> torch.Tensor:
            asked = [
                (server, self._endpoint.read(server, LookupRequest(number, part, self._group.rank, context)))
                for server, part in table.parts(rows)
            ]
            found = [self._endpoint.wait(server, answer, _LOOK_UP) for server, answer in asked]
            if not found:
                found = [torch.empty(0, table.shape[1], dtype=table.dtype, requires_grad=context is not None)]
            values = torch.cat(found).to(self._group.device)
            if values.requires_grad:
                values.register_hook(lambda _: self._used.add(number))
            return values

        return table.look_up(fetch, inputs, named)

    def _read(self, what: Any) -> Any:
        """Answer other ranks, beside the main thread."""
        answers: dict[type, Callable[[Any], Any]] = {
            LookupRequest: self._tables.look_up,
            GradientRequest: self._tables.accumulate,
        }
        return answers.get(type(what), self._store.read)(what)

    def _norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        self._round.send()
        return self._owner_layout.norm(parameters)


def _served(module: EmbeddingTable, division: RowDivision, rank: int) -> ServedTable:
    """``module`` as ``rank`` sees it; its rows are where they lie already, or where ``division`` puts them."""
    weight = module.weight
    if isinstance(weight, TablePart):
        return ServedTable(module, weight.held.of, rank)
    return ServedTable(
        module, division.place(module.num_embeddings, module.embedding_dim * weight.element_size()), rank
    )


def _words(rows_of: Mapping[int, range]) -> str:
    """Such as ``rank 2``, or ``rank 2 (rows 0 to 4) and rank 3 (rows 5 to 8)``."""
    if len(rows_of) == 1:
        return f"rank {next(iter(rows_of))}"
    return " and ".join(f"rank {server} (rows {rows.start} to {rows.stop - 1})" for server, rows in rows_of.items())


class _AutogradContext:
    """The context of distributed autograd in which a micro-batch is computed."""

    def __init__(self) -> None:
        self.id: int | None = None  #: within a micro-batch
        self._opened: Final = contextlib.ExitStack()

    def enter(self) -> None:
        """Open it."""
        self.id = self._opened.enter_context(dist_autograd.context())

    def leave(self) -> None:
        """Close it, and drop the gradients in it here and on servers."""
        self.id = None
        self._opened.close()
