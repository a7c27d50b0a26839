"""Losses and gradients that are not finite end the run before the parameters take them, or are said."""

import contextlib
import io
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint import list_checkpoints
from lockstep.errors import NonFiniteError, PeerLost
from lockstep.run import Run
from lockstep.testing import run_each, state_hash
from waiting import wait_until
from worlds import on_world

SIZES = {"global_batch": 8, "micro_batch": 2}  # 4 steps an epoch
X = torch.sin(torch.arange(64.0)).view(32, 2)
GOOD, NAN_LOSS, INF_LOSS, NAN_GRADIENT, INF_BESIDE = range(5)


OF_ANY_RANK = "in the sum over the micro-batches of all ranks, any of which may have brought it"


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")


def loss_of(outputs, kinds):
    """A loss that is odd if one of the samples says so."""
    loss, kind = outputs.square().mean(), int(kinds.max())
    if kind == NAN_LOSS:
        return loss * torch.nan
    if kind == INF_LOSS:
        return loss * torch.inf
    if kind == NAN_GRADIENT:  # of a finite loss
        return loss + torch.sqrt(0 * outputs.sum())
    if kind == INF_BESIDE:  # with a finite gradient, so that only this rank finds it
        return loss + torch.inf
    return loss


def data(kind, micro_batch):
    """The third step of four, and in it one micro-batch of four, is odd."""
    kinds = torch.zeros(32, dtype=torch.long)
    kinds[16 + 2 * micro_batch] = kind
    return TensorDataset(X, kinds)


def trained(kind, micro_batch, strategy="ddp", directory=None, epochs=1, **settings):
    """How training ends, in words; whether the model is that of after step 2; and the steps done."""
    after_step = {0: ""}
    run = None
    try:
        with Run(strategy=strategy, checkpoint=directory, save_every=directory and "1 step", **settings) as run:
            module = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
            model = run.model(module)
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            batches = run.loader(data(kind, micro_batch), shuffle=False, **SIZES)
            for _ in run.epochs(epochs):
                for x, kinds in run.train(batches):
                    if directory:  # what is said of the last checkpoint is to be known
                        wait_until(partial(is_saved, run), "the checkpoint of the last step")
                    if run.step(loss_of, x, kinds):
                        after_step[run.progress.step] = local_hash(module)
    except (NonFiniteError, PeerLost) as error:
        return type(error).__name__, str(error), local_hash(module) == after_step.get(2), run.progress.step
    return "", "", local_hash(module) == after_step[run.progress.step], run.progress.step


def is_saved(run):
    return (run._context.checkpointer.committed_step() or 0) >= run.progress.step


def local_hash(module):
    """Of what this rank holds of ``module``."""
    here = [p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in module.parameters()]
    return state_hash([tensor for tensor in here if not tensor.is_meta])


WAY_OUT = ". Look at the data and the learning rate, or continue anyway with Run(on_nan='warn') or 'ignore'."
LOSSES = [
    (kind, words, micro_batch, strategy)
    for kind, words in ((NAN_LOSS, "nan"), (INF_LOSS, "inf"))
    for micro_batch, strategy in ((2, "ddp"), (3, "ddp"), (3, "zero"), (2, "pipeline"))
]


def test_a_loss_that_is_not_finite_ends_the_run_before_the_parameters_take_it():
    results = on_world(2, [(trained, kind, micro_batch, strategy) for kind, _, micro_batch, strategy in LOSSES])
    for (_, words, micro_batch, strategy), (other, finder) in zip(LOSSES, results, strict=True):
        says = (
            f"the loss is {words} at step 3 on rank 1, micro-batch {micro_batch} of 4; no checkpoint was saved before"
        )
        assert finder == ("NonFiniteError", says + WAY_OUT, True, 2), strategy
        # The last stage of a pipeline has handed its gradient on.
        assert other[0] == "PeerLost" or (strategy == "pipeline" and "the gradient of " in other[1]), other


def test_a_loss_that_is_not_finite_under_fsdp():
    # Rank 0 is told by the end of the other's process.
    other, finder = run_each(trained, 2, NAN_LOSS, 3, "fsdp")
    assert finder.value[0] == "NonFiniteError"
    assert "the loss is nan at step 3 on rank 1, micro-batch 3 of 4" in finder.value[1]
    assert other.value[0] == "PeerLost"


def test_a_gradient_that_is_not_finite_is_found_where_the_loss_is_finite():
    cases = [(micro_batch, s) for micro_batch in (0, 3) for s in ("ddp", "zero", "fsdp", "pipeline")]
    for world in (1, 2):
        calls = [(trained, NAN_GRADIENT, *case) for case in cases]
        for case, ranks in zip(cases, on_world(world, calls), strict=True):
            assert "NonFiniteError" in [how for how, *_ in ranks], (case, ranks)
            for rank, (how, words, as_before, step) in enumerate(ranks):
                assert how in ("NonFiniteError", "PeerLost"), (case, words)
                if how == "NonFiniteError":
                    assert (as_before, step) == (True, 2), case
                    assert words.startswith("the gradient of "), words
                    assert f"is not finite at step 3, {OF_ANY_RANK}; no checkpoint" in words
                    assert f"rank {rank}" not in words, "it holds a part of the sum, and may have brought nothing"
                    if case[1] == "ddp":
                        assert words.startswith("the gradient of 0.weight, 0.bias, 2.weight and 1 more is not finite")


def test_locate_names_the_rank_and_the_micro_batch_that_brought_it():
    cases = [(m, s) for s in ("ddp", "zero", "diloco:period=2", "fsdp") for m in (0, 3)] + [(3, "pipeline")]
    for world in (1, 2):
        calls = [(partial(trained, on_nan="locate"), NAN_GRADIENT, *case) for case in cases]
        for case, ranks in zip(cases, on_world(world, calls), strict=True):
            micro_batch, strategy = case
            told = [words for how, words, *_ in ranks if how == "NonFiniteError"]
            if strategy == "fsdp" and world == 2:
                assert all(OF_ANY_RANK in words for words in told), case  # no rank has a gradient of its own
                continue
            rank = world - 1 if micro_batch or strategy == "pipeline" else 0
            which = (
                "one of its 4 micro-batches"
                if strategy == "pipeline" and world == 2
                else f"micro-batch {micro_batch} of 4"
            )
            (words,) = told
            assert words.startswith(f"the gradient of 2.bias is not finite at step 3 on rank {rank}, {which}; "), case
            assert words.endswith(WAY_OUT), case
            assert [how for how, *_ in ranks].count("PeerLost") == world - 1, case


def test_the_last_checkpoint_is_named_and_none_is_made_of_what_is_odd(tmp_path):
    ((other, finder),) = on_world(2, [(trained, NAN_LOSS, 2, "ddp", str(tmp_path))])
    assert "at step 3 on rank 1, micro-batch 2 of 4; the last checkpoint is that of step 2. Look" in finder[1]
    assert other[0] == "PeerLost"
    assert [one.step for one in list_checkpoints(tmp_path)] == [2, 1]


def heard(kind, strategy, directory, on_nan):
    """How two epochs end, and what the leader said; the forkserver's stderr is not the test's."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        how, *_, step = trained(kind, 3, strategy, directory, epochs=2, keep=1, on_nan=on_nan)
    return how, step, said.getvalue()


def test_warn_says_it_and_keeps_the_checkpoint_from_before(tmp_path):
    loss = "step 3 on rank 1, micro-batch 3 of 4; training goes on, as on_nan='warn' says"
    cases = {
        (INF_BESIDE, "ddp"): f"the loss is inf at {loss}",
        (INF_BESIDE, "fsdp"): f"the loss is inf at {loss}",
        (NAN_LOSS, "ddp"): f"the loss is nan at {loss}",
        (NAN_GRADIENT, "ddp"): f"is not finite at step 3, {OF_ANY_RANK}; training goes on",
        (NAN_GRADIENT, "zero"): f"is not finite at step 3, {OF_ANY_RANK}; training goes on",
    }
    directories = [tmp_path / str(number) for number in range(len(cases))]
    calls = [(heard, *case, str(directory), "warn") for case, directory in zip(cases, directories, strict=True)]
    for words, directory, ranks in zip(cases.values(), directories, on_world(2, calls), strict=True):
        assert [(how, step) for how, step, _ in ranks] == [("", 8)] * 2, ranks
        assert [one.step for one in list_checkpoints(directory)] == [8, 2], "that of before, although keep=1"
        assert ranks[0][2].count(words) == 1, "once, though it is so in the second epoch, too"


def test_ignore_looks_at_nothing(tmp_path):
    ((first, other),) = on_world(2, [(heard, NAN_LOSS, "ddp", str(tmp_path), "ignore")])
    assert first[:2] == other[:2] == ("", 8)
    assert [one.step for one in list_checkpoints(tmp_path)] == [8]
    assert "8 samples/step" in first[2]
    assert "finite" not in first[2]


def test_it_can_be_set_from_outside(monkeypatch, capfd):
    monkeypatch.setenv("LOCKSTEP_ON_NAN", "warn")
    assert trained(INF_BESIDE, 0)[0] == ""
    assert "the loss is inf at step 3 on rank 0, micro-batch 0 of 4; training goes on" in capfd.readouterr().err
    monkeypatch.setenv("LOCKSTEP_ON_NAN", "stop")
    assert trained(INF_BESIDE, 0)[0] == "NonFiniteError"


def with_padding(strategy):
    """Where a micro-batch counts for nothing, so does its loss."""
    with Run(strategy=strategy, replay=False) as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        padding = 0
        for x in run.train(run.loader(X[:30], **SIZES)):  # the last step has 3 micro-batches
            padding += not run.counts
            run.step(model(x).square().mean() + (0 if run.counts else torch.inf))
        return padding, run.progress.step, run.metrics["loss"] < 100


def test_padding_does_not_count():
    for ranks in on_world(4, [(with_padding, "ddp"), (with_padding, "fsdp")]):
        assert sum(padding for padding, *_ in ranks) >= 1
        assert [rest for _, *rest in ranks] == [[4, True]] * 4


def in_fp16(factor):
    try:
        with Run(precision="fp16") as run:
            model = run.model(nn.Linear(2, 1))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-9))
            before = state_hash(model)
            for _ in run.epochs(5):
                for x in run.train(run.loader(X, **SIZES)):
                    run.step((model(x) * factor).float().square().mean())
            return "", run.progress.step, run._context.precision.loss_scale, state_hash(model) == before
    except (NonFiniteError, PeerLost) as error:
        return str(error), run.progress.step, run._context.precision.loss_scale, state_hash(model) == before


def test_in_fp16_skipped_steps_are_no_error_and_a_vanishing_loss_scale_is():
    for world in (1, 2):
        overflows, nothing_else = on_world(world, [(in_fp16, 300.0), (in_fp16, torch.nan)])
        for said, step, scale, _ in overflows:
            assert (said, step) == ("", 20)
            assert 1 <= scale < 65536, "steps have been skipped"
        found = [told for told in nothing_else if "left during" not in told[0]]
        assert found
        for said, *rest in found:
            assert said.startswith(
                "the loss scale fell to 0.5 at step 17, for so many steps had gradients that are not finite and were "
                "skipped; no checkpoint was saved before. Look at"
            )
            assert rest == [16, 0.5, True]


def in_fp16_with_a_schedule(directory=None, epochs=5):
    """Steps made, the schedule's count of them, how often the loss scale was halved, and the bits."""
    with Run(precision="fp16", checkpoint=directory) as run:
        model = run.model(nn.Linear(2, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
        schedule = run.scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
        for _ in run.epochs(epochs):
            for x in run.train(run.loader(X, **SIZES)):
                run.step((model(x) * 300).float().square().mean())
        halved = int(math.log2(65536 / run._context.precision.loss_scale))
        return run.progress.step, schedule.last_epoch, halved, state_hash(model, optimizer)


def test_in_fp16_a_schedule_counts_the_steps_that_were_made():
    steps, counted, halved, _ = in_fp16_with_a_schedule()
    assert steps == 20
    assert halved > 0
    assert counted == steps - halved


def test_in_fp16_a_resume_goes_on_with_the_loss_scale(tmp_path, monkeypatch):
    whole = in_fp16_with_a_schedule()
    in_fp16_with_a_schedule(tmp_path, epochs=3)
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    assert in_fp16_with_a_schedule(tmp_path) == whole


def test_a_sum_that_overflows_is_no_gradient_that_is_not_finite():
    """Its own values are: the quick look is followed by a careful one."""
    with Run() as run:
        model = run.model(nn.Linear(2, 1, bias=False))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-38))
        for x in run.train(run.loader(torch.full((8, 2), 3e38), **SIZES)):
            run.step(model(x * 1e-38).sum() * 1e38 / len(x))
        assert run.progress.step == 1


def refused(match):
    return pytest.raises(NonFiniteError, match=match)


def test_of_two_optimizers_none_steps_if_one_has_no_finite_gradient():
    with refused("the gradient of weight, bias is not finite at step 1"), Run() as run:
        good, bad = (run.model(nn.Linear(2, 1)) for _ in range(2))
        one, other = (run.optimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (good, bad))
        before = state_hash(good, bad)
        for x in run.train(run.loader(X, **SIZES)):
            run.step(good(x).square().mean(), optimizer=one)
            run.step(torch.sqrt(0 * bad(x).sum()), optimizer=other)
    assert state_hash(good, bad) == before
    assert run.progress.step == 0


def test_a_step_that_was_not_made_is_not_counted_by_those_who_go_on(tmp_path):
    with Run(checkpoint=tmp_path) as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in run.epochs(2):
            with refused("at step 3") if epoch == 0 else contextlib.nullcontext():
                for x in run.train(run.loader(X, **SIZES)):
                    is_odd = (epoch, run.progress.step) == (0, 2)
                    run.step(torch.sqrt(0 * model(x).sum()) if is_odd else model(x).square().mean())
            assert run.progress.step == (2, 6)[epoch]
    assert [one.step for one in list_checkpoints(tmp_path)] == [6]
