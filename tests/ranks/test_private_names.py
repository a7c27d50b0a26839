"""The private names of torch and of Python that Lockstep uses are there, and do what Lockstep takes them to do."""

import argparse
import importlib
import inspect
import pickle
import subprocess
import sys
from functools import partial
from multiprocessing import get_context

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, get_worker_info

from foreach_lists import steps_in_lists
from lockstep import cpython_private, torch_private
from lockstep.errors import SettingError
from lockstep.testing import run_ranks

#: By the functions of the gateways, what shows that their names are there. `test_each_function_has_a_row` sees to it.
ROWS = {}


def row(function):
    ROWS[function.__name__.removeprefix("try_")] = function
    return function


def row_of_a_rank(function):
    """In a process of its own: process groups have threads, and loader processes are forked."""
    ROWS[function.__name__.removeprefix("try_")] = partial(run_ranks, function, 1)
    return function


@pytest.mark.parametrize("module", [cpython_private, torch_private])
def test_each_function_has_a_row(module):
    named = {name for name, _ in inspect.getmembers(module, inspect.isfunction) if not name.startswith("_")}
    own = {name for name in named if getattr(module, name).__module__ == module.__name__}
    assert not own - ROWS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_row(name):
    ROWS[name]()


def tensors():
    return [torch.arange(3.0), torch.arange(3.0) + 1]


@row
def try_foreach():
    here, other = tensors(), tensors()
    torch_private.foreach_add_(here, other)
    torch_private.foreach_mul_(here, 2.0)
    torch_private.foreach_div_(here, 4.0)
    assert all(map(torch.equal, here, other))
    torch_private.foreach_copy_(here, torch_private.foreach_sub(torch_private.foreach_add(other, other), other))
    assert torch_private.foreach_norm(here, 2.0)[0] == here[0].norm()


@row
def try_version_of():
    tensor = torch.zeros(2)
    before = torch_private.version_of(tensor)
    tensor += 1
    assert torch_private.version_of(tensor) == before + 1


@row
def try_storage_key():
    one, other = tensors()
    assert torch_private.storage_key(one) == torch_private.storage_key(one[1:]) != torch_private.storage_key(other)


@row
def try_key_of_storage():
    tensor = torch.zeros(2)
    assert torch_private.key_of_storage(tensor.untyped_storage()) == torch_private.storage_key(tensor)


@row
def try_storage_behind():
    from torch.multiprocessing.reductions import StorageWeakRef

    tensor = torch.zeros(2)
    weak = StorageWeakRef(tensor.untyped_storage())
    assert torch_private.key_of_storage(torch_private.storage_behind(weak.cdata)) == torch_private.storage_key(tensor)


@row
def try_shared_storage():
    storage = torch_private.shared_storage(16)
    assert storage.nbytes() == 16
    assert storage.is_shared()


@row
def try_saved_by():
    out, labels = torch.randn(2, 3, requires_grad=True), torch.tensor([0, -100])
    node = nn.functional.cross_entropy(out, labels).grad_fn
    saved = {
        name: torch_private.saved_by(node, name) for name in ("reduction", "total_weight", "weight", "ignore_index")
    }
    assert saved == {"reduction": 1, "total_weight": torch.tensor(1.0), "weight": None, "ignore_index": -100}
    assert torch_private.saved_by(node, "target") is labels
    assert torch_private.saved_by(nn.functional.mse_loss(out, out + 1, reduction="sum").grad_fn, "reduction") == 2
    assert float(torch_private.saved_by((out.sum() / 5).grad_fn, "other")) == 5
    assert torch_private.saved_by(out.mean().grad_fn, "self_sym_sizes") == (2, 3)


@row
def try_is_transformed():
    seen = []
    torch.vmap(lambda x: seen.append(torch_private.is_transformed(x)) or x)(torch.ones(2))
    assert seen == [True]
    assert not torch_private.is_transformed(torch.ones(2))


@row
def try_load_from_bytes():
    name = f"c{torch_private.load_from_bytes.__module__}\n{torch_private.load_from_bytes.__name__}\n"
    assert name.encode() in pickle.dumps(torch.ones(2), protocol=2)


@row
def try_is_view():
    tensor = torch.zeros(2, requires_grad=True)
    assert torch_private.is_view(tensor[:1])
    assert not torch_private.is_view(tensor)


class Wrapped(torch.Tensor):
    __torch_function__ = torch_private.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func


@row
def try_wrapper_tensor():
    made = torch_private.wrapper_tensor(Wrapped, [2, 3], dtype=torch.float64, device=torch.device("cpu"))
    assert (type(made), made.shape, made.dtype) == (Wrapped, (2, 3), torch.float64)
    with pytest.raises(RuntimeError, match=r"Unable to cast aten\.neg\.default"):
        made.neg()  # what `__torch_dispatch__` gives is the operation, not a tensor


class Noted(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "noted"


@row
def try_without_torch_function():
    noted = torch.zeros(2).as_subclass(Noted)
    assert noted.neg() == "noted"
    for of_modes in (False, True):
        with torch_private.without_torch_function(of_modes=of_modes):
            assert isinstance(noted.neg(), torch.Tensor)


@row
def try_gradient_hooks():
    for place, add in enumerate(("register_hook", "register_post_accumulate_grad_hook")):
        parameter, calls = nn.Parameter(torch.zeros(1)), []
        assert torch_private.gradient_hooks(parameter) == ({}, {})
        getattr(parameter, add)(calls.append)
        hooks = torch_private.gradient_hooks(parameter)[place]
        taken = dict(hooks)
        hooks.clear()
        parameter.sum().backward()
        assert not calls
        hooks.update(taken)
        parameter.sum().backward()
        assert len(calls) == 1


@row
def try_aten():
    for name in ("_local_scalar_dense", "_unsafe_view", "_foreach_add_", "_standard_gamma", "_linalg_svd", "_unique2"):
        assert torch_private.aten(name).default.name() == f"aten::{name}" if name != "_foreach_add_" else True


@row
def try_schema_of():
    assert torch_private.schema_of(torch.ops.aten.add_.Tensor).is_mutable
    assert [each.name for each in torch_private.schema_of(torch.ops.aten.add.Tensor).arguments] == [
        "self",
        "other",
        "alpha",
    ]


@row
def try_is_made_of_others():
    assert torch_private.is_made_of_others(torch.ops.aten.matmul.default)
    assert not torch_private.is_made_of_others(torch.ops.aten.mm.default)


@row
def try_set_deterministic():
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch_private.set_deterministic(warn_only=True)
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(was, warn_only=warned)


@row
def try_own_parameters():
    layer = nn.Linear(2, 2)
    torch_private.own_parameters(layer)["bias"] = None
    assert layer.bias is None
    assert list(torch_private.own_parameters(layer)) == ["weight", "bias"]


@row
def try_set_parameters():
    layer = nn.Linear(2, 2)
    torch_private.set_parameters(layer, {"weight": torch.ones(2, 2), "bias": None})
    assert layer(torch.ones(2)).tolist() == [2.0, 2.0]


@row
def try_own_buffers():
    layer = nn.BatchNorm1d(2)
    torch_private.own_buffers(layer)["running_mean"] = torch.ones(2)
    assert layer.running_mean.sum() == 2


@row
def try_compiles_by_timing():
    for loaded in (False, True):
        before = torch_private.compiles_by_timing()
        torch_private.compile_by_timing(allowed=not before)
        assert torch_private.compiles_by_timing() is not before
        torch_private.compile_by_timing(allowed=before)
        if not loaded:
            importlib.import_module("torch._inductor.config")


@row
def try_compile_by_timing():
    try_compiles_by_timing()


@row
def try_compiler_settings():
    importlib.import_module("torch._dynamo")
    settings = torch_private.compiler_settings()
    assert [settings.automatic_dynamic_shapes, settings.fail_on_recompile_limit_hit] == [True, False]
    assert settings.recompile_limit > 1


@row
def try_compute_in_lists():
    class Kind(torch.Tensor):
        pass

    assert not steps_in_lists([torch.zeros(1).as_subclass(Kind)])
    torch_private.compute_in_lists(Kind)
    assert steps_in_lists([torch.zeros(1).as_subclass(Kind)])


@row
def try_forward_hooks():
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(print)
    layer.register_forward_pre_hook(max)
    assert list(torch_private.forward_hooks(layer)) == [max, print]


@row
def try_set_call():
    layer = nn.Linear(2, 2)
    torch_private.set_call(layer, lambda x: "called")
    assert layer(torch.zeros(2)) == "called"


@row
def try_plain_call():
    layer, x = nn.Linear(2, 2), torch.ones(2)
    plain = torch_private.plain_call(layer)
    torch_private.set_call(layer, lambda x: "called")
    assert torch.equal(plain(x), layer.forward(x))


@row
def try_step_hooks():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert torch_private.step_hooks(optimizer) == ({}, {})
    optimizer.register_step_pre_hook(print)
    optimizer.register_step_post_hook(max)
    assert [list(hooks.values()) for hooks in torch_private.step_hooks(optimizer)] == [[print], [max]]


class Wrapper(torch.optim.Optimizer):
    def __init__(self, inner):
        self.param_groups, self.state = inner.param_groups, inner.state


@row
def try_complete():
    optimizer = Wrapper(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    torch_private.complete(optimizer)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
    given = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    before = dict(vars(given))
    torch_private.complete(given)
    assert vars(given) == before


@row
def try_found_inf():
    scaler = torch.amp.GradScaler("cpu")
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter * torch.inf).sum().backward()
    scaler.unscale_(optimizer)
    assert [found.item() for found in torch_private.found_inf(scaler, optimizer).values()] == [1.0]


@row
def try_note_learning_rates():
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 1)
    torch_private.note_learning_rates(scheduler, [0.5])
    assert scheduler.get_last_lr() == [0.5]
    torch_private.note_learning_rates(object(), [0.5])


@row
def try_profiler_is_on():
    assert not torch_private.profiler_is_on()
    with torch.profiler.profile(acc_events=True):  # without, torch 2.11 warns
        assert torch_private.profiler_is_on()


def loaded():
    """A loader whose one process stays, and its iterator."""
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    batches = iter(loader)
    next(batches)  # a process that has not begun takes 5 s to end
    return loader, batches


@row_of_a_rank
def try_shut_down():
    _, batches = loaded()
    torch_private.shut_down(batches)
    assert not any(worker.is_alive() for worker in batches._workers)


@row_of_a_rank
def try_forget_iterator():
    loader, batches = loaded()
    assert iter(loader) is batches
    torch_private.forget_iterator(loader)
    again = iter(loader)
    assert again is not batches
    for each in (batches, again):
        torch_private.shut_down(each)


@row_of_a_rank
def try_batches_yielded():
    batches = iter(DataLoader([1, 2]))
    next(batches)
    assert torch_private.batches_yielded(batches) == 1


class AsksForWorker(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        with torch_private.without_worker_info():
            hidden = get_worker_info() is None
        return hidden and get_worker_info() is not None


@row_of_a_rank
def try_without_worker_info():
    assert next(iter(DataLoader(AsksForWorker(), num_workers=1, multiprocessing_context="fork"))).item()


@row
def try_collectives_begun_by():
    class Group:
        def _get_sequence_number_for_group(self):
            return 7

    assert torch_private.collectives_begun_by(Group()) == 7
    assert hasattr(torch.distributed.ProcessGroup, "_get_sequence_number_for_group")


@row
def try_leave_out():
    model = nn.Linear(2, 2)
    torch_private.leave_out(model, ["bias"])
    assert model._ddp_params_and_buffers_to_ignore == ["bias"]


def alone():
    """A model under DDP, in a world of one rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return DistributedDataParallel(nn.Linear(2, 2))


@row_of_a_rank
def try_rebuild_buckets():
    torch_private.rebuild_buckets(alone())


@row_of_a_rank
def try_inside_forward():
    ddp = alone()
    with torch_private.inside_forward(ddp):
        assert ddp.module(torch.zeros(2)).shape == (2,)


@row_of_a_rank
def try_set_static_graph():
    torch_private.set_static_graph(alone())


@row_of_a_rank
def try_delay_all_reduce():
    ddp = alone()
    torch_private.set_static_graph(ddp)
    ddp.reducer.prepare_for_backward([])
    ddp.module(torch.zeros(1, 2)).sum().backward()
    torch_private.delay_all_reduce(ddp)


def divided():
    from torch.distributed.fsdp import fully_shard

    alone()
    return fully_shard(nn.Linear(2, 2))


@row_of_a_rank
def try_knows_its_root():
    model = divided()
    assert not torch_private.knows_its_root(model)
    model(torch.zeros(1, 2))
    assert torch_private.knows_its_root(model)


@row_of_a_rank
def try_gather_aside():
    torch_private.gather_aside(divided())


@row_of_a_rank
def try_watch_block():
    model, seen = divided(), []
    begin, end = torch_private.watch_block(model, seen.append, seen.append)
    x = torch.zeros(1, 2, requires_grad=True) * 1
    out = model(x)
    (given,), (returned,) = seen
    assert given is x
    assert returned is out
    out.register_hook(begin)
    out.sum().backward()
    end()


@row
def try_in_backward():
    seen, x = [], torch.zeros(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(torch_private.in_backward()))
    x.sum().backward()
    assert (seen, torch_private.in_backward()) == ([True], False)


@row
def try_after_backward():
    seen, x, y = [], torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    x.register_hook(lambda _: torch_private.after_backward(lambda: seen.append(y.grad.clone())))
    (x + y).sum().backward()
    assert seen == [torch.ones(1)]


def dispatcher():
    from torch.distributed.tensor import DTensor

    return torch_private.op_dispatcher(DTensor)


@row
def try_op_dispatcher():
    assert hasattr(dispatcher(), "sharding_propagator")


@row
def try_custom_handlers():
    assert all(isinstance(op, torch._ops.OpOverload) for op in torch_private.custom_handlers(dispatcher()))


@row
def try_set_custom_handlers():
    was = torch_private.custom_handlers(dispatcher())
    torch_private.set_custom_handlers(dispatcher(), {})
    assert torch_private.custom_handlers(dispatcher()) == {}
    torch_private.set_custom_handlers(dispatcher(), was)


@row
def try_require():
    torch_private.require("ddp", DistributedDataParallel, "_set_static_graph")
    with pytest.raises(SettingError, match=r"ddp needs DistributedDataParallel\._gone, which torch .* does not have"):
        torch_private.require("ddp", DistributedDataParallel, "_gone")
    with pytest.raises(SettingError, match=r"fsdp needs list\._gone, which torch .* does not have"):
        torch_private.require("fsdp", [], "_gone")


@row
def try_require_ddp():
    torch_private.require_ddp()


@row
def try_require_divided():
    from torch.distributed.tensor import DTensor

    torch_private.require_divided(DTensor)


@row
def try_actions_of():
    parser = argparse.ArgumentParser()
    added = parser.add_argument("--one")
    assert cpython_private.actions_of(parser)[-1] is added
    assert isinstance(parser.add_argument_group(), cpython_private.ArgumentGroup)


@row
def try_add_action():
    one, other = argparse.ArgumentParser(), argparse.ArgumentParser()
    cpython_private.add_action(other, one.add_argument("--one"))
    assert other.parse_args(["--one", "2"]).one == "2"


@row
def try_actions_by_option():
    parser = argparse.ArgumentParser()
    options = cpython_private.actions_by_option(parser)
    options["--two"] = parser.add_argument("--one")
    assert parser.parse_args(["--two", "3"]).one == "3"


@row
def try_interpreter_flags():
    code = "from lockstep import cpython_private; print(cpython_private.interpreter_flags())"
    assert "-O" in subprocess.check_output([sys.executable, "-O", "-c", code], text=True)


@row_of_a_rank
def try_children_of_multiprocessing():
    process = get_context("fork").Process(target=sys.exit, args=(3,))
    process.start()
    process.join()
    assert isinstance(list(cpython_private.children_of_multiprocessing()), list)


@row_of_a_rank
def try_launch_fork():
    process = get_context("fork").Process(target=sys.exit, args=(3,))
    started = cpython_private.launch_fork(process)
    assert started.wait() == 3


@row
def try_set_temporary_directory():
    code = (
        "from lockstep import cpython_private; from multiprocessing.util import get_temp_dir\n"
        "cpython_private.set_temporary_directory('/here'); print(get_temp_dir())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "/here"


AT_THE_END = """
import atexit, threading, time, weakref
from lockstep import cpython_private
class Any: pass
before, after = Any(), Any()
atexit.register(print, "forgotten")
weakref.finalize(before, print, "forgotten")
cpython_private.forget_exit_handlers()
atexit.register(print, "handler")
weakref.finalize(after, print, "finalizer", cpython_private.leaves_at_once())
atexit.register(lambda: print("leaves", cpython_private.leaves_at_once()))
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
cpython_private.wait_for_threads()
cpython_private.run_exit_handlers()
print("end")
"""


@row
def try_wait_for_threads():
    words = subprocess.check_output([sys.executable, "-c", AT_THE_END], text=True).split()
    assert words == ["thread", "leaves", "True", "handler", "finalizer", "False", "end"]


for name in ("run_exit_handlers", "leaves_at_once", "forget_exit_handlers", "forget_finalizers"):
    ROWS[name] = try_wait_for_threads
