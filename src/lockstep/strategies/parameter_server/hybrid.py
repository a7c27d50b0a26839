"""Embeddings on servers, the dense part replicated on workers, and distributed autograd across both.

             worker 0                    worker 1                    server
    ids ──────────────────── look-up ──────────────────────────►  rows of the table
    rows ◄───────────────────────────────────────────────────────
    dense part, loss
    backward ─────────────── gradients of the rows ────────────►  the table's gradient,
                                                                  folded along the tree by micro-batch
    ◄── the tree's sum of dense gradients ──►                     the tree's sum
    step                        step                              step

A table that no worker could hold lies on a server, and only the rows that a micro-batch asks for travel, and their
gradients. `torch.distributed.rpc` carries both: each micro-batch is one context of `torch.distributed.autograd`, whose
backward pass goes through workers and servers, and leaves gradients in the context on either side instead of in
``.grad``. From there they are folded along the tree, so that the bits are those of ``none``.

Distributed autograd adds up the gradients of several look-ups of one table as they arrive. So each look-up has a leaf
of its own there, which shares the table's memory, and the leaves' gradients are added from the last look-up of a
forward pass to the first, as autograd does on one rank. With ``sparse=True`` the result is the same for any number of
ranks, but that of ``none`` only up to rounding: in which order torch adds sparse tensors depends on how their memory is
laid out.

The user's optimizer object runs everywhere: on workers it steps the dense part, on servers the tables. Torch's
``DistributedOptimizer`` would make another one on each server, with a state that fits no checkpoint of one rank alone.

Traffic of a step, with r rows of d numbers looked up on a worker: r*d*4 bytes from servers and as many to them, and an
all-reduce of the dense part. ``ddp`` would all-reduce the whole table.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch._C._distributed_autograd import backward, get_gradients  # what torch.distributed exports, with types
from torch.distributed import autograd as dist_autograd

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import open_all_reduce, translating_peer_errors
from lockstep.errors import MismatchError, SettingError, UsageError
from lockstep.size_balancing import owners_of
from lockstep.strategies.abilities import HasServerRanks, PreparesEvaluation, PreparesForward, PreparesOptimizerStep
from lockstep.strategies.buffers import Buffers
from lockstep.strategies.gradient_accumulation import ParameterSet, divide_by_counts, total_count
from lockstep.strategies.parameter_server.embedding_tables import (
    EmbeddingTable,
    EmbeddingTables,
    GradientRequest,
    LookupRequest,
    to_device,
)
from lockstep.strategies.parameter_server.flat_buckets import (
    BucketGradients,
    FlatBucket,
    flat_buckets_of,
    set_gradients,
)
from lockstep.strategies.parameter_server.parameter_store import LayoutWithHooks, ParameterStore
from lockstep.strategies.parameter_server.rpc import RpcEndpoint, ServerRoles, SyncRound
from lockstep.strategies.parameter_server.server_context import WITHOUT_GRADIENTS
from lockstep.strategies.partial_models import mark_absent, refuse_copies
from lockstep.strategies.protocol import ReplicaAssignment, Strategy, StrategyContext
from lockstep.strategies.single_process import SingleProcess
from lockstep.strategies.sparse_gradients import sparse_parameters
from lockstep.strategies.state_layout import OwnerLayout

_LOOK_UP, _BACKWARD = "a look-up of embeddings", "the backward pass"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of ``hybrid``."""

    servers: int = 1  #: how many of the ranks serve, the last ones
    served: str = ""  #: names of the embeddings that lie there, joined by '+'; all of them, if there is none


def open_strategy(context: StrategyContext, options: Options) -> Strategy:
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


class Hybrid(Strategy, HasServerRanks, PreparesForward, PreparesOptimizerStep, PreparesEvaluation):
    """The strategy ``hybrid``."""

    def __init__(self, context: StrategyContext, roles: ServerRoles, served: Sequence[str]) -> None:
        group = context.group
        self._group: Final = group
        self._roles: Final = roles
        self._say: Final = context.say
        self._serves: Final = group.rank in roles.servers
        self.assignment = ReplicaAssignment(None if self._serves else group.rank, len(roles.workers))
        self._names: Final = served
        self._missing: Final = set(served)
        self._tables: Final = EmbeddingTables(group.rank)
        self._server_of_weight: Final[dict[torch.Tensor, int]] = {}  # the server of each table's weight
        self._loads: list[int] = [0] * len(roles.servers)  # bytes of the tables on each server
        self._endpoint: Final = RpcEndpoint(group, self._read)
        self._round: Final = SyncRound(self._endpoint, roles)
        self._store: Final = ParameterStore(group, self._endpoint)
        self._owner_layout: Final = OwnerLayout(group)
        self.state_layout = LayoutWithHooks(self._owner_layout, self._norm, self._owner_layout.load_model)
        self._role_group: Final = group.subgroup(roles.servers if self._serves else roles.workers)
        self._all_reduce: Final = open_all_reduce(self._role_group, context.runs)
        self._buffers: Final = Buffers(self._all_reduce, self._role_group)
        self._autograd_context: Final = contextlib.ExitStack()
        self._context_id: int | None = None  # within a micro-batch
        self._buckets: dict[ParameterSet, list[FlatBucket]] = {}  # of the dense part
        self._sums: BucketGradients | None = None
        self._step = 0
        self._closed = False
        if self._serves:
            self._endpoint.watch(roles.workers)

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself, as it is on rank 0; its tables are looked up where they lie. Collective.

        Raises:
            UsageError: if a table cannot lie elsewhere.
        """
        tables = self._find_tables(model)
        if not tables:
            self._say(f"{type(model).__name__} has no embedding to serve; ddp would use the servers better")
        new = [table for table in tables.values() if table.weight not in self._server_of_weight]
        owners, self._loads = owners_of([t.weight.numel() * t.weight.element_size() for t in new], self._loads)
        self._server_of_weight.update((t.weight, self._roles.servers[o]) for t, o in zip(new, owners, strict=True))
        for parameter, name in sparse_parameters(model).items():
            if parameter not in self._server_of_weight:
                raise UsageError(
                    f"{name} has sparse=True and is not served, and workers sum dense gradients among themselves; "
                    "leave sparse=True out, or let served=... name it, too"
                )
        self._store.setup_model(model, lambda tensor: self._server_of_weight.get(tensor, 0))
        tensors = model.state_dict(keep_vars=True)
        self._owner_layout.setup_model(model, lambda name: self._holders_of(tensors[name]))
        self._buffers.setup_model(model)
        for name, table in tables.items():
            server = self._server_of_weight[table.weight]
            number = self._tables.add(table, server)
            if server != self._group.rank:
                mark_absent(table, ["weight"], "hybrid")
            self._say(f"{name} {tuple(table.weight.shape)} is served by rank {server}")
            if not self._serves:
                table.forward = functools.partial(self._look_up, number)  # type: ignore[method-assign]
        if tables:
            refuse_copies(model, "hybrid")
        return model

    def begin_micro_batch(self, position: MicroBatchPosition) -> None:
        """Open a context of distributed autograd, for what this rank computes until `end_micro_batch`."""
        if not self._serves:
            self._context_id = self._autograd_context.enter_context(dist_autograd.context())

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute gradients through workers and servers; those of tables stay on their servers."""
        assert self._context_id is not None
        if self._sums is None:
            self._sums = BucketGradients(self._dense(target), position.of, exact=True)
        with translating_peer_errors(_BACKWARD):
            backward(self._context_id, [loss if weight is None else loss * weight])
        gradients = get_gradients(self._context_id)
        for bucket in self._dense(target):
            for parameter in bucket.tensors:
                parameter.grad = gradients.get(parameter)
        self._sums.accumulate(position)
        if not position.is_padding:
            take = GradientRequest(self._group.rank, self._context_id, position.index, position.of)
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
        return self._round.end_loop(complete=complete)

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """Divide by the number of items; servers divide once they learn it. All workers must call it."""
        total = total_count(self._role_group, counted)
        divide_by_counts(target, samples, total)
        self._round.unsent = {rank: replace(done, counted=total) for rank, done in self._round.unsent.items()}

    def before_optimizer_step(self, target: ParameterSet) -> None:
        """Send servers the message that gradients are in place, if it was not sent yet."""
        self._round.send()

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """After the last micro-batch, wait until the servers have stepped; then bring buffers in step."""
        self._leave_context()
        if position.last:
            self._round.answer(lambda: None)
            for _ in self._round.answers("the step of the servers"):
                pass
            self._step += 1
        if not self._serves:
            with translating_peer_errors("the reduction of buffers"):
                self._buffers.end_micro_batch(position)

    def discard_step(self) -> None:
        """Drop gradients that were not sent, and restore buffers."""
        self._leave_context()
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
        self._leave_context()
        self._all_reduce.close()
        self._endpoint.close()

    def _leave_context(self) -> None:
        self._context_id = None
        self._autograd_context.close()

    def _find_tables(self, model: nn.Module) -> dict[str, EmbeddingTable]:
        """The embeddings of ``model`` that servers are to hold, by name."""
        modules = {name: module for name, module in model.named_modules() if not self._names or name in self._names}
        self._missing.difference_update(modules)
        tables = {}
        for name, module in modules.items():
            if isinstance(module, EmbeddingTable):
                tables[name] = module
                self._check_table(model, name, module)
            elif self._names:
                raise UsageError(f"strategy hybrid: served={name} is a {type(module).__name__}; give an embedding")
        return tables

    def _check_table(self, model: nn.Module, name: str, table: EmbeddingTable) -> None:
        if table.max_norm is not None:
            raise UsageError(
                f"{name} has max_norm={table.max_norm}, so look-ups change it, and workers would do so at the same "
                "time; leave max_norm out, or name the embeddings to serve: --strategy hybrid:served=..."
            )
        sharing = [n for n, p in model.named_parameters(remove_duplicate=False) if p is table.weight]
        if len(sharing) > 1:
            raise UsageError(
                f"{' and '.join(sharing)} are one tensor, of which only look-ups can be served; name the embeddings to "
                "serve, without this one: --strategy hybrid:served=..."
            )

    def _holders_of(self, tensor: torch.Tensor) -> Sequence[int]:
        """The ranks that hold ``tensor``: a table's server, or all workers."""
        return (self._server_of_weight[tensor],) if tensor in self._server_of_weight else self._roles.workers

    def _dense(self, target: ParameterSet) -> list[FlatBucket]:
        """The buckets of the dense part, which workers sum among themselves."""
        if target not in self._buckets:
            if not target.everything:
                raise UsageError(
                    "servers make one update in each step, and this loss is for some of the parameters only; give "
                    "run.step(loss, optimizer=[first, second]) all optimizers at once"
                )
            dense = [p for p in target.parameters if p not in self._server_of_weight]
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
        server = self._tables.server_of(number)
        inputs, named = to_device((inputs, named), torch.device("cpu"))
        lookup = LookupRequest(
            number, inputs, named, self._group.rank, self._context_id if torch.is_grad_enabled() else None
        )
        rows: torch.Tensor = self._endpoint.wait(server, self._endpoint.read(server, lookup), _LOOK_UP)
        return rows.to(self._group.device)

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
