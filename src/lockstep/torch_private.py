"""The private names of torch that Lockstep uses: each is taken here, and nowhere else.

A release of torch may change any of them without a word. So each function says what it is for, and what goes wrong if
the name is gone; `tests/ranks/test_private_names.py` calls each of them, and `require` refuses a strategy on a torch
that lacks what the strategy needs. All were tried with torch 2.13.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn
from torch.optim.optimizer import _foreach_supported_types as _of_optimizers
from torch.utils import _pytree
from torch.utils._foreach_utils import _foreach_supported_types as _of_utilities

from lockstep.errors import SettingError

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

# ---- operations on lists of tensors. Without them each tensor is a call of its own: on a GPU a launch.

foreach_add: Final = torch._foreach_add
foreach_add_: Final = torch._foreach_add_
foreach_copy_: Final = torch._foreach_copy_
foreach_div_: Final = torch._foreach_div_
foreach_mul_: Final = torch._foreach_mul_
foreach_norm: Final = torch._foreach_norm
foreach_sub: Final = torch._foreach_sub

# ---- nested containers. Without it, values in containers that a package has registered would not be found.

pytree = _pytree


# ---- tensors


def version_of(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was changed in place. Without it, changes between two looks go unseen."""
    version: int = tensor._version
    return version


def storage_key(tensor: torch.Tensor) -> int:
    """The same for two tensors if, and only if, they share memory. Without it, tied weights are taken for two."""
    return key_of_storage(tensor.untyped_storage())


def key_of_storage(storage: torch.UntypedStorage) -> int:
    """`storage_key` of all tensors in ``storage``."""
    key: int = storage._cdata
    return key


def storage_behind(weak: int) -> torch.UntypedStorage | None:
    """The storage behind a weak reference of `torch.multiprocessing`; None if it is gone."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(weak)
    return found


def shared_storage(size: int) -> torch.UntypedStorage:
    """Shared memory of so many bytes. Without it, loader processes copy each micro-batch through a pipe."""
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(size)
    return storage


#: What a pickled storage names to be read again. Without it, tensors of GPUs come back on the GPU that they came from.
load_from_bytes: Final = torch.storage._load_from_bytes


def is_view(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a view for autograd, which a pipeline with split backward passes must copy."""
    view: bool = tensor._is_view()
    return view


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` stands for others under a transform of `torch.func`, and has no bytes of its own."""
    transformed: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return transformed


def wrapper_tensor(cls: type[Any], shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of the subclass ``cls`` with this shape and no memory. Without it, no model is made in parts."""
    return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)


#: ``__torch_function__`` of a subclass that only has ``__torch_dispatch__``.
no_torch_function: Final = torch._C._disabled_torch_function_impl


def without_torch_function(*, of_modes: bool = False) -> AbstractContextManager[object]:
    """A context in which ``__torch_function__`` of subclasses is not called; nor of modes, if that is asked for."""
    return torch._C.DisableTorchFunction() if of_modes else torch._C.DisableTorchFunctionSubclass()


def gradient_hooks(parameter: torch.Tensor) -> tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """The hooks of the gradient of ``parameter``, and those called once ``.grad`` holds it; torch reads these dicts."""
    return parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}


def in_backward() -> bool:
    """Whether a backward pass runs in this thread, as while a checkpoint recomputes a forward pass."""
    return torch._C._current_graph_task_id() != -1


def after_backward(function: Callable[[], None]) -> None:
    """Let ``function`` be called at the end of the backward pass that calls this, also of one within another."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def saved_by(node: Any, name: str) -> Any:
    """What a ``node`` of the graph of a backward pass keeps as ``name``; None if torch has named that otherwise.

    Whole numbers are signed. Without the names, losses that are no means over samples are not told.
    """
    try:
        saved = getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # what was saved is computed once more, which may only be done in a backward pass
        return None
    return saved - 2**64 if isinstance(saved, int) and saved >= 2**63 else saved


# ---- operations


def aten(name: str) -> Any:
    """The operation ``name`` of ATen that has no public name, such as ``_unsafe_view``."""
    return getattr(torch.ops.aten, name)


def schema_of(operation: Any) -> torch._C.FunctionSchema:
    """Arguments of an operation, with what it writes into. Without it, no operation on divided parameters is known."""
    schema: torch._C.FunctionSchema = operation._schema
    return schema


def is_made_of_others(operation: Any) -> bool:
    """Whether torch computes ``operation`` by other operations."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd")


def set_deterministic(*, warn_only: bool) -> None:
    """As `torch.use_deterministic_algorithms` does, without its settings for other libraries."""
    torch._C._set_deterministic_algorithms(True, warn_only=warn_only)


# ---- modules and optimizers


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """The parameters of ``module`` itself by their names, to be replaced there. Without it, none can be divided."""
    return module._parameters


def set_parameters(module: nn.Module, parameters: dict[str, Any]) -> None:
    """Let ``parameters`` be `own_parameters`, also tensors that are no `nn.Parameter`, as within a forward pass."""
    module._parameters = parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers of ``module`` itself by their names, to be replaced there."""
    return module._buffers


def forward_hooks(module: nn.Module) -> Iterator[Callable[..., object]]:
    """The hooks before and after the forward pass of ``module``."""
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()


def set_call(model: nn.Module, call: Callable[..., object]) -> None:
    """Let ``model(...)`` be ``call``, as `nn.Module.compile` does."""
    model._compiled_call_impl = call


def plain_call(module: nn.Module) -> Callable[..., object]:
    """What ``module(...)`` is without `set_call`."""
    call: Callable[..., Any] = module._call_impl
    return call


#: The attributes that `step_hooks` reads.
STEP_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[MutableMapping[int, object], MutableMapping[int, object]]:
    """The hooks before and after ``optimizer.step()`` by their numbers. Without it, the script's hooks are not seen."""
    before, after = (getattr(optimizer, name, {}) for name in STEP_HOOKS)
    return before, after


_INDUCTOR, _INDUCTOR_DETERMINISTIC = "torch._inductor.config", "TORCHINDUCTOR_DETERMINISTIC"


def compiles_by_timing() -> bool:
    """Whether `torch.compile` may choose among kernels by how long they take, which differs from time to time."""
    if (config := sys.modules.get(_INDUCTOR)) is not None:
        return not config.deterministic
    return os.environ.get(_INDUCTOR_DETERMINISTIC) != "1"


def compile_by_timing(*, allowed: bool) -> None:
    """Set `compiles_by_timing`, without loading the compiler, which takes a second."""
    if (config := sys.modules.get(_INDUCTOR)) is not None:
        cast(Any, config).deterministic = not allowed
    os.environ[_INDUCTOR_DETERMINISTIC] = str(int(not allowed))


def compiler_settings() -> Any | None:
    """The settings of `torch.compile` in general, if the compiler is loaded, which takes seconds.

    Without them, kernels of compiled functions depend on the shapes that a rank has met before.
    """
    return sys.modules.get("torch._dynamo.config")


def compute_in_lists(kind: type[torch.Tensor]) -> None:
    """From now on tensors of class ``kind`` are stepped and clipped in lists where torch does so with plain tensors.

    On GPUs, by default. Kernels for lists of tensors round differently from those for a tensor.
    """
    for known in (_of_optimizers, cast(list[type], _of_utilities)):
        if kind not in known:
            known.append(kind)


def complete(optimizer: torch.optim.Optimizer) -> None:
    """Give ``optimizer`` the tables of hooks that its class has left out, by not calling `Optimizer.__init__`.

    Wrappers such as Lookahead do so, and such an optimizer can be stepped, but has no `state_dict`.
    """
    if not hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
        optimizer.__setstate__({"defaults": getattr(optimizer, "defaults", {})})  # as of one that an older torch saved


def found_inf(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
    """By devices, whether gradients of ``optimizer`` are not finite. Without it, ranks skip fp16 steps differently."""
    noted: dict[Any, torch.Tensor] = scaler._found_inf_per_device(optimizer)
    return noted


def note_learning_rates(scheduler: object, rates: list[object]) -> None:
    """Let `get_last_lr` of a scheduler give ``rates``; a scheduler of another library may have none."""
    if hasattr(scheduler, "_last_lr"):
        scheduler._last_lr = rates


def profiler_is_on() -> bool:
    """Whether a profiler of torch records. Without it, two profilers end in an error of torch's."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


# ---- data sets


def forget_iterator(loader: DataLoader[object]) -> None:
    """Let ``loader`` make a new iterator for its next epoch, with new loader processes."""
    loader._iterator = None


def shut_down(batches: Any) -> None:
    """End the loader processes behind an iterator of a `DataLoader`."""
    batches._shutdown_workers()


def batches_yielded(batches: Any) -> int:
    """How many batches an iterator of a `DataLoader` has given. Without it, an iterator that goes on is not seen."""
    yielded: int = batches._num_yielded
    return yielded


@contextmanager
def without_worker_info() -> Iterator[None]:
    """A context in which `torch.utils.data.get_worker_info` gives None, so that a stream reads everything."""
    from torch.utils.data._utils import worker

    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


# ---- process groups


def collectives_begun_by(group: Any) -> int:
    """How many collectives a process group has begun here. Without it, a hang is reported without its collective.

    Raises:
        RuntimeError: if the backend keeps no such number.
    """
    begun: int = group._get_sequence_number_for_group()
    return begun


# ---- DistributedDataParallel


def leave_out(model: nn.Module, names: Iterable[str]) -> None:
    """Let DDP leave parameters and buffers of these names alone."""
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Lay out DDP's buckets by the order of the first backward pass, if it is time for that. Collective then."""
    ddp.reducer._rebuild_buckets()


def inside_forward(ddp: DistributedDataParallel) -> AbstractContextManager[object]:
    """A context that DDP takes for its forward pass."""
    context: AbstractContextManager[object] = ddp._inside_ddp_forward()
    return context


def set_static_graph(ddp: DistributedDataParallel) -> None:
    """Let DDP take each backward pass to be like the first one."""
    ddp._set_static_graph()


def delay_all_reduce(ddp: DistributedDataParallel) -> None:
    """Let DDP sum all gradients at the end of the first backward pass of a static graph."""
    ddp.reducer._delay_all_reduce()  # type: ignore[attr-defined]


# ---- fully_shard and DTensor


def knows_its_root(block: Any) -> bool:
    """Whether ``block``, divided by `fully_shard`, has had a forward pass, in which it finds the root of its model."""
    return block._get_fsdp_state()._is_root is not None


def gather_aside(block: Any) -> None:
    """Let ``block`` be gathered by asynchronous collectives, so that prefetching overlaps."""
    block._set_unshard_async_op(True)


def watch_block(
    block: Any,
    note_inputs: Callable[[Iterable[torch.Tensor]], None],
    note_outputs: Callable[[Iterable[torch.Tensor]], None],
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], None]]:
    """Let ``note_inputs`` and ``note_outputs`` have the tensors of each call of ``block``, in place of torch's hooks.

    Torch puts a function around the inputs, which changes the order in which the gradients of an input are added, and
    with them bits. Only tensors that need gradients are given, and only where gradients are enabled.

    Returns:
        What these hooks would do. The first begins a backward pass of the block: gathers its parameters; given a
        gradient, which it returns. The second ends the pass: sums the gradient, and frees the parameters.

    Raises:
        SettingError: if torch has no such hooks, see `require`.
    """
    state = block._get_fsdp_state()
    group = state._fsdp_param_group
    require("fsdp", group, "_register_post_backward_hook", "post_backward")
    require("fsdp", state, "_register_pre_backward_hook", "_pre_backward")
    # Torch's own, which looks into dataclasses; older releases look into containers only.
    collect = type(state)._register_pre_backward_hook.__globals__.get("collect_grad_tensors", pytree.tree_leaves)

    def needing_gradients(values: object) -> list[torch.Tensor]:
        return [one for one in collect(values) if isinstance(one, torch.Tensor) and one.requires_grad]

    def register_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.is_grad_enabled():
            note_inputs(needing_gradients((args, kwargs)))
        return args, kwargs

    def register_outputs(output: object) -> object:
        if torch.is_grad_enabled():
            note_outputs(needing_gradients(output))
        return output

    group._register_post_backward_hook = register_inputs
    state._register_pre_backward_hook = register_outputs
    return state._pre_backward, group.post_backward


def op_dispatcher(dtensor: Any) -> Any:
    """The object of the class `DTensor` that finds out how an operation is computed."""
    return dtensor._op_dispatcher


def custom_handlers(dispatcher: Any) -> dict[Any, object]:
    """The operations that `op_dispatcher` hands to functions of ours before it looks anywhere else.

    Without this table, operations on divided parameters give torch's errors, or in places what is wrong.
    """
    handlers: dict[Any, Any] = dispatcher._custom_op_handlers
    return handlers


def set_custom_handlers(dispatcher: Any, handlers: dict[Any, Any]) -> None:
    """Let ``handlers`` be the table of `custom_handlers`."""
    dispatcher._custom_op_handlers = handlers


# ---- what a strategy needs, asked before it is opened


def require(strategy: str, owner: object, *names: str) -> None:
    """Check that this torch has the private names that a strategy needs of a class or an object.

    Raises:
        SettingError: if one of ``names`` is missing.
    """
    for name in names:
        if not hasattr(owner, name):
            kind = getattr(owner, "__name__", type(owner).__name__)
            raise SettingError(
                f"strategy {strategy} needs {kind}.{name}, which torch {torch.__version__} does not have; "
                "use torch 2.13, with which it was tried, or another strategy"
            )


def require_ddp() -> None:
    """`require` of what sums gradients by DDP's reducer.

    Raises:
        SettingError: as `require` does.
    """
    ddp = torch.nn.parallel.DistributedDataParallel
    require("ddp", ddp, "_inside_ddp_forward", "_set_static_graph", "_set_params_and_buffers_to_ignore_for_model")


def require_divided(dtensor: type) -> None:
    """`require` of what computes with divided parameters; ``dtensor`` is torch's class of that name.

    Raises:
        SettingError: as `require` does.
    """
    require("fsdp", dtensor, "_op_dispatcher")
    require("fsdp", op_dispatcher(dtensor), "_custom_op_handlers", "sharding_propagator")
