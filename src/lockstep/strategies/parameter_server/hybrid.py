"""Embeddings on servers, the dense part replicated on workers.

             worker 0                    worker 1                    servers, each with some rows of the tables
    ids ──────────────────── look-up ──────────────────────────►  rows
    rows ◄───────────────────────────────────────────────────────
    dense part, loss, backward
    ◄── the tree's sum of dense gradients ──►
             gradients of the rows, added row by row,
             along the tree by micro-batch ────────────────────►  the tree's sum
    step                        step                              step

Tables that no rank could hold lie on servers, divided by rows, and only the rows that a micro-batch asks for travel,
each once, and their gradients. A worker computes the look-up itself, in a small table of the rows that it has been
sent, which is a leaf of autograd. So the bits are those of ``none``: the leaves' gradients are added from the last
look-up of a forward pass to the first, as autograd does on one rank, and then along the tree. With ``sparse=True`` the
result is the same for any number of ranks, but that of ``none`` only up to rounding: in which order torch adds sparse
tensors depends on how their memory is laid out.

The user's optimizer object runs everywhere: on workers it steps the dense part, on servers the tables.

Traffic of a micro-batch, with r different rows of d numbers in a look-up: r*d*4 bytes from servers; of a step, the
gradients of all rows that were looked up in it to servers, and an all-reduce of the dense part. ``ddp`` would
all-reduce the whole table.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import nn

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import TreeAccumulator, broadcast_from_rank0, translating_peer_errors
from lockstep.errors import SettingError, UsageError
from lockstep.strategies.not_whole.absent_parameters import refuse_changes
from lockstep.strategies.not_whole.division_checks import check_fused_kernel
from lockstep.strategies.not_whole.partial_models import mark_absent, of_absent_parameters, refuse_copies
from lockstep.strategies.parameter_server.embedding_tables import (
    EmbeddingTable,
    Gradients,
    Lookup,
    ServedTable,
    merge_gradients,
    set_table_gradients,
    sum_of_look_ups,
)
from lockstep.strategies.parameter_server.flat_buckets import flat_buckets_of, set_gradients
from lockstep.strategies.parameter_server.row_division import RowDivision
from lockstep.strategies.parameter_server.served_parameters import WITHOUT_GRADIENTS
from lockstep.strategies.parameter_server.served_strategy import (
    Push,
    ServedLayout,
    ServerRoles,
    SyncServers,
    require_everything,
    sum_of,
)
from lockstep.strategies.parameter_server.table_construction import (
    TablePart,
    construct,
    find_tables,
    own_rows,
    place_rest,
    restore_unserved,
)
from lockstep.strategies.parts.gradient_accumulation import (
    ParameterSet,
    TreeGradientAccumulator,
    divide_by_counts,
    parameters_of,
    steps_across_elements,
)
from lockstep.strategies.parts.module_states import verify_module_states
from lockstep.strategies.replicated.single_process import SingleProcess
from lockstep.strategies.strategy import Strategy, StrategyContext, UpdateShare
from lockstep.strategy_kinds import HybridOptions

_LOOK_UP: Final = "a look-up of embeddings"


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


class Hybrid(SyncServers):
    """The strategy ``hybrid``."""

    divides_construction = True
    update_share = UpdateShare()
    pull = "the step of the servers"

    def __init__(self, context: StrategyContext, roles: ServerRoles, served: Sequence[str]) -> None:
        super().__init__(context, roles)
        self._names: Final = served
        self._missing: Final = set(served)
        self._division: Final = RowDivision(roles.servers)
        self._tables: Final[list[ServedTable]] = []  # in the order of their numbers, which are the same on all ranks
        self._table_of: Final[dict[torch.Tensor, ServedTable]] = {}  # by its parameter, on every rank
        self._look_ups: Final = self._open_mailbox()
        self._layout: Final = ServedLayout(context, self._send_pushes)
        self.state_layout = self._layout
        self._dense: Final[dict[ParameterSet, ParameterSet]] = {}  # the part that workers sum among themselves
        self._looked_up: list[Lookup] | None = None  # in this micro-batch; None: none is under way
        self._rows: TreeAccumulator[Gradients] | None = None  # the gradients of tables in this step
        self._in_loop = False
        self._closed = False
        if self._serves:
            self._look_ups.answer(self._read, _LOOK_UP)

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
        verify_module_states(self._group, model)
        elsewhere = {id(module.weight) for module in modules.values()}
        rest = dict.fromkeys((*model.parameters(), *model.buffers()))
        broadcast_from_rank0(self._group, [tensor for tensor in rest if id(tensor) not in elsewhere])
        for name, table in tables.items():
            table.keep(own_rows(name, table, self._group))
            self._tables.append(table)
            self._say(f"{name} {table.shape} is served by {_words(table.rows_of)}")
        self._group.barrier("the rows of tables")
        for number, (name, table) in enumerate(tables.items(), len(self._tables) - len(tables)):
            if not table.whole_here:
                mark_absent(table.module, ["weight"], "hybrid", shape=table.shape)
            if not self._serves:
                table.module.forward = functools.partial(self._look_up, number)  # type: ignore[method-assign]
                refuse_changes(table.module.weight, f"{name}.weight", lambda: self._in_loop)
            self._table_of[table.module.weight] = table
        # Servers hold their rows of a table; all else all workers do.
        holders = {
            name: tuple(self._table_of[tensor].rows_of) if tensor in self._table_of else self._roles.workers
            for name, tensor in model.state_dict(keep_vars=True).items()
        }
        divided = {f"{name}.weight".lstrip("."): table.shard() for name, table in tables.items() if table.is_divided}
        self._layout.setup_model(model, lambda name: holders[name], divided)
        self._buffers.setup_model(model)
        if tables:
            refuse_copies(model, "hybrid")
        return model

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that ``optimizer`` steps each row of a divided table by itself.

        Raises:
            UsageError: if it is one of torch's that do not, or rounds rows differently, or if the weights to be
                evaluated depend on its state.
        """
        known = steps_across_elements(optimizer)
        if known and any(p in self._table_of and self._table_of[p].is_divided for p in parameters_of(optimizer)):
            raise UsageError(
                f"{known} updates a row by the values of other rows, and the rows of an embedding are divided between "
                "servers; use another optimizer for it, servers=1, or ddp"
            )
        check_fused_kernel(optimizer, lambda p: p in self._table_of and self._table_of[p].is_divided)
        super().check_optimizer(optimizer)

    def explain(self, error: Exception, method: str) -> str:
        """Where torch speaks of a table whose rows are on servers."""
        return of_absent_parameters("hybrid", error, method)

    def begin_micro_batch(self, position: MicroBatchPosition) -> None:
        """Note the look-ups of the forward pass from now on, for their gradients."""
        if not self._serves:
            self._in_loop, self._looked_up = True, []

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute gradients; after a worker's last micro-batch, those of tables are ready to be sent to the servers."""
        if target not in self._dense:
            require_everything(target)
            dense = tuple(p for p in target.parameters if p not in self._table_of)
            self._dense[target] = ParameterSet(dense, everything=True)
        if self._sums is None or self._rows is None:
            self._sums = TreeGradientAccumulator(self._dense[target], position.of)
            self._rows = TreeAccumulator(position.of, merge_gradients)
        if not position.is_padding:
            target.backward(loss, weight)
            self._sums.accumulate(position)
            gradients = sum_of_look_ups(self._looked_up or (), self._tables)
            self._rows.push((position.index, position.index + 1), gradients)
        if position.last:
            self._unsent = {server: self._push_for(server, self._rows, position.of) for server in self._roles.servers}
            self._reduce(self._dense[target].parameters, self._sums, position.of)
            self._sums = self._rows = None

    def end_loop(self, *, complete: bool) -> bool:
        """End the loop over micro-batches; whether it was complete. Collective."""
        self._in_loop = False
        return super().end_loop(complete=complete)

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """Divide by the number of items; servers divide once they learn it."""
        divide_by_counts(target, samples, counted)
        super().normalize_by_count(target, samples, counted)

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """After the last micro-batch, wait until the servers have stepped; then bring buffers in step."""
        self._looked_up = None
        super().end_micro_batch(position)

    def end_replay(self) -> None:
        """Restore buffers."""
        self._looked_up = None
        super().end_replay()

    def discard_step(self) -> None:
        """Drop gradients that were not sent, and restore buffers."""
        self._looked_up = self._rows = None
        super().discard_step()

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
        super().resync()
        self._group.barrier("the start of the loop over micro-batches")

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
        try:
            super().close()
        finally:
            self._look_ups.close()

    def _push_for(self, server: int, rows: TreeAccumulator[Gradients], micro_batches: int) -> Push:
        """What a worker sends ``server`` of the gradients of a step: its rows."""
        held = {n: table.rows_of[server] for n, table in enumerate(self._tables) if server in table.rows_of}
        sums = [{n: g.within(held[n]) for n, g in gradients.items() if n in held} for gradients in rows.sums]
        return Push(self._step, micro_batches, rows.nodes, sums, set())

    def _set_gradients(self, target: ParameterSet, of: int, pushes: Sequence[Push]) -> None:
        set_table_gradients(self._tables, sum_of(pushes, of, merge_gradients, exact=True))

    def _reduce(self, dense: Sequence[nn.Parameter], sums: TreeGradientAccumulator, micro_batches: int) -> None:
        """Set ``.grad`` of the dense part to the sum over all workers; None for what had no part in any loss."""
        with translating_peer_errors("the reduction of gradients"):
            for bucket in flat_buckets_of(dense, [0] * len(dense)):
                # Behind it a 1 for each parameter that had a part in some loss: their sum says so to all workers.
                used = bucket.tensors[0].new_tensor([place in sums.used for place in bucket.places])
                partials = [torch.cat([bucket.pack(row), used]) for row in sums.tree.sums]
                out = used.new_empty(sum(p.numel() for p in bucket.tensors) + len(used))
                self._all_reduce.begin(out, partials, micro_batches)
                self._all_reduce.finish()
                flat, counts = out.tensor_split([-len(used)])
                set_gradients(bucket, flat, {bucket.places[i] for i in counts.nonzero().flatten().tolist()})

    def _look_up(self, number: int, *inputs: object, **named: object) -> torch.Tensor:
        """Look up rows on the server; called in place of the forward pass of a table."""
        if self._closed:
            raise UsageError("an embedding that servers held was looked up after the run was closed; do so within")
        table = self._tables[number]

        def fetch(rows: torch.Tensor) -> torch.Tensor:
            parts = table.parts(rows)
            found = self._look_ups.ask({server: (number, part) for server, part in parts}, _LOOK_UP)
            values = torch.cat([torch.empty(0, table.shape[1], dtype=table.dtype, device="cpu"), *found])
            if self._looked_up is not None and table.trained and torch.is_grad_enabled():
                self._looked_up.append(Lookup(number, rows, values.requires_grad_()))
            return values.to(self._group.device)

        return table.look_up(fetch, inputs, named)

    def _read(self, question: tuple[int, torch.Tensor]) -> torch.Tensor:
        """Answer a worker, beside the main thread."""
        number, rows = question
        return self._tables[number].read(rows)


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
