"""Kernels that give the same bits each time; tried on the CPU, of whose operations a few have none either."""

import os

import pytest
import torch
from torch.nn import functional as F

import lockstep
from lockstep.errors import MismatchError, UsageError
from lockstep.gpu_driver import has_started_cuda
from lockstep.run.setup.identity import compare_devices, device_of_bits
from lockstep.run.setup.kernels import Kernels
from worlds import on_world


class Puts(torch.autograd.Function):
    """Its backward pass calls an operation without a deterministic kernel."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone().put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def flags():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


PINNED = (True, True, False, False, False)


@pytest.fixture
def kernels():
    made = Kernels(pins=True, refuses=True)
    yield made
    made.release()


def test_flags_are_set_while_a_run_is_open_and_put_back(kernels, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = flags()
    assert kernels.pin() == ""
    assert flags() == PINNED, "memory is not filled, which would cost a tenth of a step"
    kernels.release()
    assert flags() == before
    kernels.release()
    assert flags() == before


def test_what_the_script_sets_in_between_is_put_back_and_said(kernels):
    kernels.pin()
    assert kernels.pin() == ""
    torch.backends.cudnn.benchmark = True
    assert kernels.pin() == "torch.backends.cudnn.benchmark = True"
    torch.backends.cudnn.benchmark = True
    torch.use_deterministic_algorithms(False)
    said = kernels.pin()
    assert said == "torch.backends.cudnn.benchmark = True and torch.use_deterministic_algorithms(False)"
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert kernels.pin() == "torch.backends.cuda.enable_cudnn_sdp(True)", "its backward pass has other bits each time"
    assert flags() == PINNED


def test_the_compiler_makes_kernels_of_each_shape_whatever_came_before(kernels):
    shapes = []

    def backend(graph, inputs):
        shapes.append([tuple(each.shape) for each in inputs])
        return graph.forward

    function = torch.compile(lambda x: x.sin() * 2, backend=backend)
    before = torch.compiler.config.recompile_limit
    kernels.pin()
    for size in range(2, 4 + before):
        function(torch.ones(size))
    assert shapes == [[(size,)] for size in range(2, 4 + before)]
    kernels.release()
    assert [torch.compiler.config.recompile_limit, torch.compiler.config.automatic_dynamic_shapes] == [before, True]


def test_a_backward_pass_without_a_deterministic_kernel_is_refused_with_its_name(kernels):
    kernels.pin()
    x = torch.ones(3, requires_grad=True)
    said = r"^put_, which the backward pass calls.*nondeterministic='warn'"
    with pytest.raises(UsageError, match=said), kernels.backward():
        Puts.apply(x).sum().backward()
    assert flags() == PINNED
    with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
        torch.ones(3).put_(torch.tensor([0]), torch.tensor([1.0]))  # elsewhere, torch warns
    with pytest.raises(RuntimeError, match="another error"), kernels.backward():
        raise RuntimeError("another error")


def test_a_forward_pass_without_a_deterministic_kernel_is_refused_with_its_name(kernels):
    """Of what torch refuses no backward pass of; outside of a loss it computes, as for a metric."""
    x = torch.ones(2, 3, 4, 4, requires_grad=True)
    maps = F.cross_entropy(x, torch.zeros(2, 4, 4, dtype=torch.long))
    for loss, name in ((maps, "nll_loss2d"), (x.flatten().cumsum(0).sum(), "cumsum"), (x.median(1)[0].sum(), "median")):
        with pytest.raises(UsageError, match=rf"^{name}.* has no deterministic kernel on this device"):
            kernels.examine(loss, is_checked=True)
    kernels.examine(F.cross_entropy(x.flatten(1), torch.zeros(2, dtype=torch.long)), is_checked=True)
    kernels.examine((x * x.detach().cumsum(0)).sum() + x.median(), is_checked=True)
    Kernels(pins=False, refuses=True).examine(maps, is_checked=True)
    Kernels(pins=True, refuses=False).examine(maps, is_checked=True)
    fresh = Kernels(pins=True, refuses=True)
    for _ in range(2):
        with pytest.raises(UsageError):
            fresh.examine(maps, is_checked=False)
    fresh.examine(maps, is_checked=False)


def test_where_the_user_says_so_torch_warns(kernels):
    lenient = Kernels(pins=True, refuses=False)
    lenient.pin()
    with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"), lenient.backward():
        Puts.apply(torch.ones(3, requires_grad=True)).sum().backward()
    assert torch.backends.cuda.cudnn_sdp_enabled()
    lenient.release()


def test_where_no_bits_are_promised_nothing_is_set():
    before = flags()
    kernels = Kernels(pins=False, refuses=True)
    assert kernels.pin() == ""
    with kernels.backward():
        assert flags() == before


def trained(strategy, closure):
    """A training with kernels as on a GPU; what the backward pass finds set."""
    found = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            found.append(torch.is_deterministic_algorithms_warn_only_enabled())
            return gradient

    with lockstep.Run(strategy=strategy) as run:
        run._context.kernels.__init__(pins=True, refuses=True)
        run._context.kernels.pin()
        run._train_step._kernels = run._context.kernels
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        model = run.model(net)
        run.optimizer(torch.optim.LBFGS(net.parameters()) if closure else torch.optim.SGD(net.parameters(), 0.1))
        batches = run.loader((torch.ones(8, 2),), global_batch=4, micro_batch=2)
        for _ in run.epochs(1):
            for (x,) in run.train(batches):
                if closure:
                    run.step(lambda y, _: Looks.apply(y).sum(), x, x)
                else:
                    run.step(Looks.apply(model(x)).sum())
    return set(found), flags()[:2]


def test_every_backward_pass_is_strict():
    assert trained("none", closure=False) == ({False}, (False, False))
    assert trained("none", closure=True) == ({False}, (False, False))
    assert on_world(2, [(trained, s, False) for s in ("ddp", "fsdp")]) == [[({False}, (False, False))] * 2] * 2


def compared(names):
    with lockstep.Run() as run:
        try:
            compare_devices(run._context.group, names[run.rank])
        except MismatchError as error:
            return str(error)
        return ""


def test_ranks_on_unequal_devices_are_refused():
    of_cpu = device_of_bits(torch.device("cpu"), {"MKL_CBWR": "COMPATIBLE", "HOME": "x"})
    assert of_cpu.startswith(
        f"a CPU by {torch.backends.cpu.get_cpu_capability()} kernels (MKL_CBWR=COMPATIBLE), torch."
    )
    assert on_world(2, [(compared, ["H100", "H100"])])[0] == ["", ""]
    for said in on_world(2, [(compared, ["H100", "A100"])])[0]:
        assert said.startswith("rank 0 computes on H100, rank 1 on A100: kernels give other bits there")


def test_a_look_for_gpus_starts_no_cuda():
    """`tests/gpu/test_gpu.py` shows it where there is a GPU."""
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    torch.cuda.is_available()
    assert not has_started_cuda()
