"""What bits depend on beside tensors is watched: threads, formats, modes and attributes of modules, CPU kernels."""

import contextlib
import io
from functools import partial

import pytest
import torch
from torch import nn

from lockstep.errors import LockstepError, MismatchError
from lockstep.run import Run
from lockstep.testing import run_each, run_ranks, state_hash
from worlds import on_world, under_own

X = torch.sin(torch.arange(64.0)).view(32, 2)
SIZES = {"global_batch": 8, "micro_batch": 2}  # 4 steps an epoch


class Net(nn.Module):
    """Of torch's own modules, with an attribute of its own that a forward pass sets, and one that it uses."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop, self.out = nn.Linear(2, 8), nn.Dropout(0.25), nn.Linear(8, 1)
        self.scale, self.seen = 1.0, 0.0

    def forward(self, x):
        self.seen = float(x.sum())
        return self.out(self.drop(self.layer(x))) * self.scale


def threads(model, number=2):
    """As a script does, or a library on its behalf."""
    torch.set_num_threads(number)
    assert torch.get_num_threads() == number


def to_eval(model):
    model.eval()


def no_dropout(model):
    model.drop.p = 0.0


def unscaled(model):
    model.scale = 0.5


def wide(model):
    torch.set_default_dtype(torch.float64)


def coarse(model):
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def trained(change, where, odd=None, step=6, directory=None, strategy="ddp", **settings):
    """Trains 4 epochs; ``change`` is made once, on the rank ``odd``, or on all.

    ``where``: in the loop's "body" after that step, "between" two passes, or in an "evaluation".

    Returns:
        What it ended with, its class and its words, and after how many steps; a hash; what the leader said.
    """
    said = io.StringIO()
    precision = torch.backends.mkldnn.matmul.fp32_precision
    run = None
    try:
        with contextlib.redirect_stderr(said), Run(strategy=strategy, checkpoint=directory, **settings) as run:
            module = Net()
            model = run.model(module)
            run.optimizer(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
            batches, held_out = run.loader(X, **SIZES), run.loader(X, **SIZES, shuffle=False)

            def due(here, at=None):
                return here == where and odd in (None, run.rank) and (at or run.progress.step) == step

            for epoch in run.epochs(4):
                if epoch and due("between", 4 * epoch):
                    change(module)
                for batch in run.train(batches):
                    run.step(model(batch).square().mean())
                    if due("body"):
                        change(module)
                for number, batch in enumerate(run.evaluate(held_out)):
                    run.measure(norm=model(batch).square().view(-1))
                    if number == 0 and due("evaluation", 4 * epoch + 4):
                        change(module)
            return "", "", run.progress.step, state_hash(module.state_dict()), said.getvalue()
    except LockstepError as error:
        return type(error).__name__, str(error), run.progress.step, "", said.getvalue()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.backends.mkldnn.matmul.fp32_precision = precision
        torch.set_num_threads(1)


def of_ranks(*calls):
    return on_world(2, [(partial(trained, *args, **settings),) for *args, settings in calls])


class Sets(torch.utils.data.Dataset):
    """Sets threads whenever a sample is read, on the rank ``odd``, as where a library is used there."""

    def __init__(self, is_odd):
        self.is_odd = is_odd

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        if self.is_odd:
            torch.set_num_threads(3)
        return X[index]


def reads(odd):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), Run() as run:
            module = Net()
            model = run.model(module)
            run.optimizer(torch.optim.SGD(module.parameters(), lr=0.1))
            batches = run.loader(Sets(run.rank == odd), workers=0, **SIZES)
            for _ in run.epochs(2):
                for batch in run.train(batches):
                    run.step(model(batch).square().mean())
            return torch.get_num_threads(), run.progress.step, state_hash(module.state_dict()), said.getvalue()
    finally:
        torch.set_num_threads(1)


def test_threads_that_change_while_samples_are_read_are_put_back_before_each_body_and_told_once():
    plain, odd = on_world(2, [(reads, None), (reads, 1)])
    assert [rank[1:3] for rank in odd] == [rank[1:3] for rank in plain]
    assert odd[0][3].count("rank 1: torch.set_num_threads(3) was put back: kernels would give other bits") == 1


def test_threads_that_change_between_two_passes_are_put_back_and_told():
    plain, odd, every = of_ranks(
        (threads, "between", {"step": 0}),
        (threads, "between", {"odd": 1, "step": 8}),
        (threads, "between", {"step": 8}),
    )
    said = "torch.set_num_threads(2) was put back: kernels would give other bits"
    for ranks in (odd, every):
        assert [rank[:4] for rank in ranks] == [rank[:4] for rank in plain], "the bits are those without"
    assert said not in plain[0][4]
    assert odd[0][4].count(f"rank 1: {said}") == 1
    assert every[0][4].count(said) == 2, "of the leader, and of the others"


@pytest.mark.parametrize("odd", [0, 1, None])
@pytest.mark.parametrize("where", ["body", "evaluation"])
def test_what_was_computed_with_other_threads_ends_the_run(odd, where, tmp_path):
    (ranks,) = of_ranks((threads, where, {"odd": odd, "step": 8, "directory": str(tmp_path)}))
    found = [rank for number, rank in enumerate(ranks) if odd in (None, number)]
    place = "the loop's body in step 8" if where == "body" else "the body of an evaluation"
    for kind, words, *_ in found:
        assert kind == "UsageError"
        assert words.startswith(f"torch has 2 CPU threads after {place}, and had 1 before: torch.set_num_threads(2)")
        assert words.endswith("Run(threads=2) sets them for the whole run, on all ranks")
    assert {kind for kind, *_ in ranks} <= {"UsageError", "PeerLost"}


def test_one_rank_alone_has_its_threads_watched_and_more_are_its_own_choice():
    assert trained(threads, "body")[0] == "UsageError"
    assert trained(threads, "body", threads=2)[:3] == ("", "", 16)
    assert trained(threads, "body", reduction="fast")[:3] == ("", "", 16), "where no bits are promised"


@pytest.mark.parametrize("odd", [1, None])
@pytest.mark.parametrize(
    ("change", "name"),
    [(wide, "torch.get_default_dtype()"), (coarse, "torch.backends.mkldnn.matmul.fp32_precision")],
    ids=["dtype", "precision"],
)
def test_formats_are_those_with_which_the_training_began(change, name, odd, tmp_path):
    (ranks,) = of_ranks((change, "body", {"odd": odd, "directory": str(tmp_path), "save_every": "7 steps"}))
    for number, (kind, words, step, *_) in enumerate(ranks):
        assert kind == ("UsageError" if odd in (None, number) else "PeerLost")
        if kind == "UsageError":
            assert words.startswith(f"{name} is "), words
            assert "when the training began: kernels give other bits" in words
            assert step == 7, "before it is saved"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (to_eval, "the training mode of models.0, as the loop over run.train(...) was left, on rank 1"),
        (no_dropout, "models.0.drop.p, as the loop over run.train(...) was left, on rank 1"),
        (unscaled, "model.scale, which run.step(...) is computed from, on rank 1"),
    ],
)
def test_modules_that_are_set_otherwise_on_one_rank_are_found(change, name):
    (ranks,) = of_ranks((change, "body", {"odd": 1}))
    for kind, words, step, *_ in ranks:
        assert (kind, step) == ("MismatchError", 8 if change is not unscaled else 9), "before the next evaluation"
        assert words.startswith(f"ranks hold different values after step {step}: "), words
        assert name in words, words


def trained_with():
    """The kernels with which a rank has trained."""
    with Run() as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        rows = torch.rand(8, 2, generator=torch.Generator().manual_seed(0))
        for batch in run.train(run.loader(rows, global_batch=4, micro_batch=2)):
            run.step(model(batch).square().mean())
    return torch.backends.cpu.get_cpu_capability()


def test_a_rank_with_other_kernels_of_its_cpu_is_named_with_the_variable():
    same = {"ATEN_CPU_CAPABILITY": "default"}
    # Torch reads the variable at its first operation, which this module makes when it is imported.
    for outcome in run_each(under_own, 2, [{}, same], __name__, "trained_with"):
        assert isinstance(outcome.error, MismatchError), "the data is not accused"
        said = str(outcome.error)
        assert "rank 0 computes on a CPU by " in said
        assert "rank 1 on a CPU by DEFAULT kernels (ATEN_CPU_CAPABILITY=default)" in said
        assert "with equal variables" in said
    assert run_ranks(under_own, 2, [same, same], __name__, "trained_with") == ["DEFAULT"] * 2
