"""An audit: what is computed twice and where, who is accused, what is found, and that nothing is without a fault."""

import itertools
import os
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from audit import EVERY, WHAT, Flip, clean_steps, draw, what_was_found
from campaign_marks import combinations
from lockstep import Run
from lockstep.batch import BatchPlan, StepCheck
from lockstep.data.indexed.sampling import AuditedSteps, CheckedSteps, audited_alone, epoch_positions
from lockstep.errors import SettingError
from lockstep.run.proofs.audit import judged
from lockstep.run.proofs.replay import Digest
from lockstep.run.proofs.replay_series import MOST
from lockstep.testing import state_hash
from worlds import error_of, on_world

# ---- which is computed twice -----------------------------------------------------------------------------------------

PLANS = st.tuples(st.integers(1, 40), st.integers(1, 8), st.integers(1, 5), st.sampled_from(["none", "one", "even"]))


@given(PLANS, st.integers(1, 3), st.integers(0, 9), st.integers(0, 5))
def test_each_rank_audits_one_of_another_and_nothing_else_is_another(sizes, every, done, seed):
    samples, micro_batch, ranks, padding = sizes
    plan = BatchPlan(12, micro_batch, ranks)
    steps, checks = plan.epoch(samples), CheckedSteps(2, 1, audits=AuditedSteps(every, done, seed))
    chosen, audited = {}, {}
    for rank in range(ranks):
        plain = list(epoch_positions(steps, rank, first_step=0, padding=padding))
        found = list(epoch_positions(steps, rank, first_step=0, padding=padding, checks=checks))
        own = [p for p in found if not p.is_replay]
        assert [(p.step, p.index, p.last, p.is_padding) for p in own] == [
            (p.step, p.index, p.last, p.is_padding) for p in plain
        ]
        for p in found:
            assert p.audited == ((done + p.step + 1) % every == 0)
            assert not p.audited or not p.is_checked
            if p.audited and p.is_replay:
                assert not p.last
                assert p.is_other_ranks == (p.index not in plan.run(rank, p.of))
                audited.setdefault((p.step, p.index), []).append(rank)
            elif p.audited and p.check is StepCheck.REPLAYED:
                chosen[p.step, p.index] = rank
    # What is computed twice is one of each rank's that has any, on another rank where there is one.
    assert audited.keys() == chosen.keys() if padding != "none" else audited.keys() <= chosen.keys()
    for place, owner in chosen.items():
        by = [rank for rank in audited.get(place, ()) if rank != owner]
        alone = sum(step == place[0] for step, _ in chosen) == 1
        assert by or alone
        assert not alone or audited[place][0] == owner or owner in audited[place]


def test_the_seed_chooses_all_micro_batches_and_all_auditors_in_time():
    plan, seen = BatchPlan(12, 2, 3), set()
    checks = CheckedSteps(audits=AuditedSteps(1, 0, 0))
    for rank in range(3):
        for p in epoch_positions(plan.epoch(12 * 60), rank, first_step=0, padding="none", checks=checks):
            seen |= {(rank, p.index)} if p.is_replay else set()
    assert seen == {(rank, index) for rank, index in itertools.product(range(3), range(6)) if index // 2 != rank}


def test_of_a_stream_a_rank_computes_one_of_its_own_three_times():
    positions = list(epoch_positions(BatchPlan(8, 2, 1).epoch(8), 0, first_step=0, padding="none"))
    found = audited_alone(positions, 1)
    assert [(p.index, p.check) for p in found] == [
        (0, StepCheck.NONE), (1, StepCheck.REPLAYED), (2, StepCheck.NONE),
        (1, StepCheck.REPLAY), (1, StepCheck.REPLAY), (3, StepCheck.NONE),
    ]  # fmt: skip


# ---- who is accused --------------------------------------------------------------------------------------------------

RIGHT = Digest(0, "right", "gradients")


@given(st.integers(2, 8), st.data())
def test_whoever_gives_other_bits_than_most_is_accused_and_nobody_else(ranks, data):
    # The owner, an auditor, and all ranks once more.
    owner, auditor = data.draw(st.permutations(range(ranks)))[:2]
    wrong = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=max(1, (ranks - 1) // 2)))
    always = {rank: data.draw(st.booleans()) for rank in wrong}
    plays = [
        (rank, Digest(0, f"wrong {rank}", "gradients") if rank in wrong and (first or always[rank]) else RIGHT)
        for rank, first in [(owner, True), (auditor, True), *((rank, False) for rank in range(ranks))]
    ]
    verdict = judged(plays)
    gave = {rank for rank, digest in plays if digest != RIGHT}
    if not gave:
        assert verdict is None
    elif ranks == 2 and any(always[rank] for rank in gave):
        assert verdict.wrong == set()
    else:
        assert verdict.wrong == gave
        assert verdict.right == RIGHT


def test_gradients_that_one_rank_does_not_compute_are_no_difference():
    without = Digest(0, "right", "")
    assert judged([(0, RIGHT), (1, without), (2, RIGHT)]) is None
    assert judged([(0, RIGHT), (1, without), (2, Digest(0, "right", "others")), (0, RIGHT)]).wrong == {2}


# ---- what is found ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_flipped_bits_are_found_and_their_ranks_accused():
    """`python benchmarks/audit.py` flips 200."""
    strategies = itertools.cycle(["zero", "fsdp", "ddp"])
    flips = [
        Flip(what, "once", next(strategies), 3, (number % 3,), EVERY - (what in ("gradient", "batch")), 20, 7 * number)
        for number, what in enumerate(WHAT)
    ]
    flips += [Flip("gradient", "broken", "fsdp", 3, (1,), 2, 22, 3), Flip("parameter", "any", "ddp", 3, (2,), 2, 22, 9)]
    for result in what_was_found(flips):
        assert result.placed, result
        assert result.later <= EVERY
        if result.flip.what == "parameter" and result.flip.when == "any":
            assert "which holds other bytes of" in result.error


def test_two_ranks_know_that_one_is_wrong_and_one_alone_that_it_was():
    (both,) = what_was_found([Flip("gradient", "broken", "ddp", 2, (1,), 2, 20, 3)])
    assert "it cannot be told which" in both.error
    assert "rank 0 of 2 (host " in both.error
    (alone,) = what_was_found([Flip("batch", "once", "ddp", 1, (0,), EVERY - 1, 20, 3)])
    assert alone.placed
    assert "gave other bits once" in alone.error


def test_flips_are_of_all_kinds():
    flips = draw(200, random.Random(1))
    assert {(f.what, f.strategy, f.ranks) for f in flips} >= set(
        itertools.product(WHAT, ("ddp", "zero", "fsdp"), (2, 3, 4))
    )


# ---- and nothing else ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", combinations([1, 3], campaign=lambda ranks: ranks == 1))
def test_without_a_fault_nothing_is_found(ranks):
    calls = [(clean_steps, strategy, 40) for strategy in ("ddp", "zero", "fsdp")]
    for ended in on_world(ranks, calls):
        assert [(one.steps, one.error) for one in ended] == [(40, "")] * ranks


def trained(audit, micro_batch, workers=0):
    with Run(seed=1, audit=audit) as run:
        torch.manual_seed(0)
        model = run.model(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1)))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        x = torch.sin(torch.arange(52.0)).view(26, 2)
        batches = run.loader(TensorDataset(x), global_batch=8, micro_batch=micro_batch, workers=workers)
        count = 0
        for _ in run.epochs(2):
            for (inputs,) in run.train(batches):
                loss = model(inputs).square().mean()
                run.measure(mean=inputs.mean())
                if run.backward(loss):
                    count += 1
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    run.update()
        return state_hash(model, optimizer), run.metrics, count


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_audit_changes_nothing(ranks):
    """Also in short steps, in which some ranks have nothing to do, and where clipping stands between the halves."""
    sizes = (2,) if ranks > 2 else (2, 8 // ranks)
    calls = [(trained, audit, size) for size in sizes for audit in (None, "1 step", "3 steps")]
    found = on_world(ranks, calls)
    for plain, *audited in (found[:3], found[3:]) if found[3:] else (found,):
        assert audited == [plain, plain]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.sin(torch.arange(32.0)).view(16, 2))


class Broken(nn.Linear):
    """Gives another output now and then, as a device does: no line of a script shows that."""

    calls = 0
    file = os.memfd_create("calls")

    def forward(self, x):
        os.write(self.file, b".")  # outside of Python's objects
        Broken.calls = number = os.lseek(self.file, 0, os.SEEK_CUR)
        return super().forward(x) * (1.0 + 2.0**-20 * (number in self.wrong))


def streamed(*wrong):
    Broken.wrong = wrong
    os.lseek(Broken.file, 0, os.SEEK_SET)
    with Run(audit="4 steps") as run:
        model = run.model(Broken(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(3):
            for x in run.train(run.loader(Stream(), global_batch=8, micro_batch=2)):
                run.step(F.mse_loss(model(x), x[:, :1]))
        return Broken.calls


def test_a_stream_is_audited_where_it_was_read():
    # With replays of the first three steps, two of the fourth one, and a series of them in the first one.
    assert streamed() == 6 * 4 + 3 + 2 + MOST
    assert "gave other bits once" in error_of(RuntimeError, streamed, 19 + MOST)


# ---- what is refused -------------------------------------------------------------------------------------------------


def refused(**settings):
    with Run(**settings) as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        run.loader(TensorDataset(torch.zeros(8, 2)), global_batch=8, micro_batch=2)


def test_it_is_refused_where_two_ranks_need_not_agree():
    assert "replay=False" in error_of(SettingError, refused, audit="5 steps", replay=False)
    assert "give a number of steps" in error_of(SettingError, refused, audit="5 min")
    (said,) = on_world(2, [(_said, "local-sgd")])
    assert all("use ddp, zero or fsdp" in one for one in said)


def _said(strategy):
    return error_of(SettingError, refused, audit="5 steps", strategy=strategy)
