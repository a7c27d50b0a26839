"""What ranks send is made smaller: what is lost by it, what is not, and that all ranks hold the same bits."""

import os
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lockstep.collectives import RankOrderAllReduce, TensorShard, open_group, single_rank_group
from lockstep.errors import SettingError
from lockstep.launch_contract import RESUME
from lockstep.run import Run
from lockstep.strategies import StrategyContext, open_strategy
from lockstep.strategies.replicated.compression import Cast
from lockstep.strategies.replicated.powersgd import PowerSGD, orthonormalize
from lockstep.strategies.replicated.single_process import SingleProcess
from lockstep.testing import state_hash
from lockstep.world import World
from worlds import on_world

RANKS = 3


def net():
    """Matrices of equal and of other shapes, one in channels last, one too small to gain by factors, and vectors."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
        nn.Linear(12, 16),
        nn.Linear(16, 12, bias=False),
        nn.Linear(12, 16),
        nn.Linear(16, 2),
        nn.BatchNorm1d(4),
    )
    model[2].weight.requires_grad_(False)
    return model


# ---- bases -----------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 40)),
    depends=st.integers(0, 6),
    scale=st.sampled_from((1e-12, 1.0, 1e12)),
    dtype=st.sampled_from((torch.float32, torch.float64)),
    seed=st.integers(0, 1000),
)
def test_bases_are_orthonormal_whatever_they_are_made_from(shape, depends, scale, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape, generator=generator, dtype=dtype) * scale
    if depends:
        rows[:, depends:] = rows[:, :1] * (1 + 1e-7)  # nearly the first row once more
    wanted = rows.clone()
    orthonormalize(rows)
    products = rows @ rows.mT
    kept = products.diagonal(dim1=1, dim2=2).round()
    torch.testing.assert_close(products, torch.diag_embed(kept), atol=1e-5, rtol=0)
    # All that was spanned still is.
    torch.testing.assert_close(wanted @ rows.mT @ rows / scale, wanted / scale, atol=1e-4, rtol=1e-4)


def test_nothing_has_no_basis_and_what_is_not_finite_stays_visible():
    rows = torch.zeros(2, 2, 5)
    rows[1, 0, 0] = float("nan")
    orthonormalize(rows)
    assert not rows[0].any()
    assert rows[1, 0].isnan().all()


# ---- what may be told ------------------------------------------------------------------------------------------------


def terms(group, *, exact=True, dtype=None, say=print):
    runs = lambda rank, _: range(rank, rank + 1)  # noqa: E731
    return StrategyContext(group, runs, exact=exact, bucket_mb=None, dtype=dtype, rehearse=False, say=say)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("ddp:compress=zip", r"compress='zip'; give one of none, fp16, bf16, powersgd$"),
        ("ddp:compress=powersgd,rank=0", r"rank=0, start=0; give a rank from 1 and a start from 0$"),
        ("ddp:compress=powersgd,start=-1", r"rank=1, start=-1; "),
        ("ddp:compress=powersgd,rank=two", r"rank='two'; give a whole number$"),
        ("ddp:compress=bf16,rank=2", r"rank and start are PowerSGD's, and compress=bf16; "),
    ],
)
def test_what_cannot_be_is_refused(spec, says):
    with pytest.raises(SettingError, match=says):
        open_strategy(spec, terms(single_rank_group()))


def test_one_rank_alone_has_nothing_to_compress():
    assert isinstance(open_strategy("ddp:compress=powersgd,rank=2,start=3", terms(single_rank_group())), SingleProcess)


# ---- on ranks --------------------------------------------------------------------------------------------------------


def meet():
    return open_group(World.from_env(os.environ), torch.device("cpu"), 60)


def leave(group):
    """No rank goes while another one may still wait for it."""
    group.barrier("end of the case")
    group.close()


def gradients_of(model, rank, step, dtype=torch.float32):
    """A gradient for each parameter, another one for each rank and step, laid out as the parameter is."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return {p: torch.empty_like(p, dtype=dtype).copy_(torch.randn(p.shape, generator=generator)) for p in parameters}


def reduce(compression, gradients, buckets=1):
    """As DDP does: in buckets, from the last parameter to the first. The sums, in the parameters' order."""
    parameters = list(gradients)[::-1]
    each = -(-len(parameters) // buckets)
    flats = []
    for first in range(0, len(parameters), each):
        inside = parameters[first : first + each]
        flat = torch.cat([gradients[p].permute(_order(p)).reshape(-1) for p in inside])
        views = [
            piece.as_strided(p.shape, p.stride())
            for p, piece in zip(inside, flat.split([p.numel() for p in inside]), strict=True)
        ]
        compression.begin(flat, inside, views)
        flats.append((inside, views))
    compression.finish()
    sums = {p: view for inside, views in flats for p, view in zip(inside, views, strict=True)}
    return [sums[p].clone() for p in gradients]


def _order(parameter):
    """The dimensions as they lie in memory."""
    return sorted(range(parameter.dim()), key=parameter.stride, reverse=True)


def true_sums(model, step, ranks=RANKS):
    each = [gradients_of(model, rank, step).values() for rank in range(ranks)]
    return [torch.stack([g.double() for g in of]).sum(0) for of in zip(*each, strict=True)]


def errors_of(compression, group):
    """The errors of all ranks, whole, by name."""
    mine = compression.state_dict()["models"][0]["errors"]
    return {name: torch.stack(group.gather_objects(part.tensor[0].clone(), name)) for name, part in mine.items()}


def nothing_is_lost(rank):
    """The greatest distance between what was applied and is left over, and the truth; the errors' growth; hashes."""
    group, model = meet(), net()
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    compression = PowerSGD(group, rank=rank, start=0, may_skip=False)
    compression.setup_model(model)
    true = applied = 0
    distances, sizes, hashes = [], [], []
    for step in range(12):
        sums = reduce(compression, gradients_of(model, group.rank, step), buckets=1 + step % 3)
        truth = true_sums(model, step)
        true = [a + b for a, b in zip(true, truth, strict=True)] if step else truth
        applied = [a + b.double() for a, b in zip(applied, sums, strict=True)] if step else [s.double() for s in sums]
        errors = errors_of(compression, group)
        left = dict(zip(_trained(model), applied, strict=True))
        for name, error in errors.items():
            left[name] = left[name] + error.double().sum(0).view_as(left[name])
        distances.append(max(float((a - b).abs().max()) for a, b in zip(left.values(), true, strict=True)))
        sizes.append(float(sum(e.sum(0).square().sum() for e in errors.values())))
        hashes.append(state_hash(sums))
    leave(group)
    assert set(errors) < names
    return sorted(errors), max(distances), sizes, hashes


def _trained(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


def thin_sums_are_exact():
    """Of gradients whose sum has rank 2, sent with rank 2, in buckets of any cut; how far from the truth."""
    group, model = meet(), nn.Sequential(nn.Linear(20, 30, bias=False), nn.Linear(30, 20, bias=False))
    compression = PowerSGD(group, rank=2, start=0, may_skip=False)
    compression.setup_model(model)
    away = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        left = {p: torch.randn(p.shape[0], 2, generator=generator) for p in model.parameters()}
        right = {p: torch.randn(RANKS, 2, p.shape[1], generator=generator) for p in model.parameters()}
        sums = reduce(compression, {p: left[p] @ right[p][group.rank] for p in model.parameters()}, buckets=2)
        true = [left[p] @ right[p].sum(0) for p in model.parameters()]
        away.append(max(float((a - b).abs().max()) for a, b in zip(sums, true, strict=True)))
    leave(group)
    return max(away)


def sleepers_wake():
    """A parameter without gradient in some steps is still learned from afterwards."""
    group, model = meet(), nn.Linear(20, 30, bias=False)
    compression = PowerSGD(group, rank=1, start=0, may_skip=False)
    compression.setup_model(model)
    for _ in range(3):
        (nothing,) = reduce(compression, {model.weight: torch.zeros(30, 20)})
    thin = torch.outer(torch.arange(30.0), torch.arange(20.0))
    (something,) = reduce(compression, {model.weight: thin.clone()})
    leave(group)
    return bool(nothing.any()), float((something - RANKS * thin).abs().max() / thin.max())


def starts_later():
    """In how many of the first steps the sums were the plain ones."""
    group, model = meet(), net()
    compression = PowerSGD(group, rank=1, start=2, may_skip=False)
    compression.setup_model(model)
    plain = []
    for step in range(4):
        sums = reduce(compression, gradients_of(model, group.rank, step), buckets=2)
        true = true_sums(model, step)
        plain.append(all(torch.allclose(a.double(), b, atol=1e-5) for a, b in zip(sums, true, strict=True)))
    leave(group)
    return plain


def skipped_steps_leave_no_error():
    """One rank's gradient overflows: all are told by theirs, and what is remembered is what was."""
    group, model = meet(), net()
    compression = PowerSGD(group, rank=1, start=0, may_skip=True)
    compression.setup_model(model)
    told = []
    for step in range(3):
        gradients = gradients_of(model, group.rank, step)
        if step == 1 and group.rank == 1:
            gradients[model[1].bias][3] = float("inf")
        before = _remembered(compression)
        sums = reduce(compression, gradients)
        told.append(([bool(s.isfinite().all()) for s in sums], _remembered(compression) == before))
    leave(group)
    return told


def _remembered(compression):
    one = compression.state_dict()["models"][0]
    return state_hash(one["q"], {name: part.tensor for name, part in one["errors"].items()})


def whole(state, group):
    """As a checkpoint gives it back."""
    models = []
    for one in state["models"]:
        errors = {}
        for name, part in one["errors"].items():
            assert isinstance(part, TensorShard)
            rows = group.gather_objects((part.start, part.tensor.clone()), name)
            errors[name] = torch.full(part.shape, float("nan"))
            for start, row in rows:
                errors[name][start[0] : start[0] + 1] = row
        qs = {name: q.clone() for name, q in one["q"].items()}
        models.append({"steps": one["steps"], "q": qs, "errors": errors})
    return {"models": models}


def goes_on_exactly():
    """The same bits as without a break, on ranks that begin with what was saved."""
    group, model = meet(), net()
    first = PowerSGD(group, rank=2, start=1, may_skip=False)
    first.setup_model(model)
    for step in range(4):
        reduce(first, gradients_of(model, group.rank, step), buckets=2)
    saved = whole(first.state_dict(), group)
    second = PowerSGD(group, rank=2, start=1, may_skip=False)
    second.setup_model(model)
    second.load_state_dict(saved)
    ends = [
        state_hash([reduce(c, gradients_of(model, group.rank, step), buckets) for step in range(4, 7)])
        for c, buckets in ((first, 2), (second, 1))
    ]
    same_errors = _remembered(first) == _remembered(second)
    leave(group)
    return ends, same_errors


def moves_to_fewer_ranks():
    """What is left over, before and after two ranks take over from three; then a start with nothing saved."""
    group, model = meet(), net()
    compression = PowerSGD(group, rank=1, start=0, may_skip=False)
    compression.setup_model(model)
    for step in range(3):
        reduce(compression, gradients_of(model, group.rank, step))
    saved = whole(compression.state_dict(), group)
    before = {name: e.sum(0) for name, e in saved["models"][0]["errors"].items()}
    result = None
    if group.rank < 2:
        two = group.subgroup([0, 1])
        fewer = PowerSGD(two, rank=3, start=0, may_skip=False)  # also of another rank
        fewer.setup_model(model)
        fewer.load_state_dict(saved)
        after = {name: e.sum(0) for name, e in errors_of(fewer, two).items()}
        kept = [float((after[name] - before[name]).abs().max()) for name in after]
        fewer.load_state_dict({})
        sums = reduce(fewer, gradients_of(model, two.rank, 0))
        fresh = PowerSGD(two, rank=3, start=0, may_skip=False)
        fresh.setup_model(model)
        restarted = state_hash(sums) == state_hash(reduce(fresh, gradients_of(model, two.rank, 0)))
        result = len(kept), max(kept), restarted
    leave(group)
    return result


def casts(name):
    """How far a sum is from the truth, as a part of the greatest addend; hashes for several cuts of the buckets."""
    group, model, dtype = meet(), net(), getattr(torch, name)
    compression = Cast(group, dtype)
    compression.setup_model(model)
    hashes, away = [], 0.0
    for buckets in (1, 2, 5):
        sums = reduce(compression, gradients_of(model, group.rank, 0), buckets)
        away = max(away, *(float((a - b).abs().max()) for a, b in zip(sums, true_sums(model, 0), strict=True)))
        hashes.append(state_hash(sums))
    leave(group)
    return away, hashes, {str(s.dtype) for s in sums}


def casts_what_is_small_enough():
    """bf16 gradients stay as they are on an fp16 line; fp16 overflows to infinity, for the loss scale to see."""
    group, model = meet(), nn.Linear(8, 8, bias=False)
    compression = Cast(group, torch.float16)
    (kept,) = reduce(compression, {model.weight: torch.full((8, 8), 2.0**100, dtype=torch.bfloat16)})
    (burst,) = reduce(compression, {model.weight: torch.full((8, 8), 60000.0)})
    leave(group)
    return float(kept[0, 0]), float(burst[0, 0])


def sums_of_ranks():
    """The order of additions is fixed, wherever an element lies: (rank 0 + rank 1) + rank 2, or its mirror image."""
    group = meet()
    sums = RankOrderAllReduce(group)
    values = torch.randn(RANKS, 1000, generator=torch.Generator().manual_seed(0))
    mine = values[group.rank].clone()
    cut = mine.clone()
    sums.begin(mine)
    pieces = cut.split(37)
    for piece in pieces:
        sums.begin(piece)
    sums.finish()
    leave(group)
    sums.close()
    return torch.equal(mine, cut), torch.equal(mine, values[0] + (values[1] + values[2]))


def learn(spec, steps=None, directory=None):
    """Train a little on real buckets, each epoch's second step with two micro-batches on three ranks; the model."""
    data = torch.randn(32, 40, generator=torch.Generator().manual_seed(3))
    with Run(seed=5, strategy=spec, checkpoint=directory, bucket_mb=0.005) as run:
        model = run.model(nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Dropout(0.1), nn.Linear(60, 40)))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        batches = run.loader(data, global_batch=24, micro_batch=4)
        for _ in run.epochs(4):
            for batch in run.train(batches):
                run.step(F.mse_loss(model(batch), batch))
                if run.progress.step == steps:
                    break
            if run.progress.step == steps:
                break
        return state_hash(model), torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


def same_again(spec):
    return [learn(spec)[0] for _ in range(2)]


def ends_near(spec):
    """How far it ends from where uncompressed training ends, as a part of the way."""
    begin, true, here = (learn(*told)[1] for told in (("ddp", 0), ("ddp",), (spec,)))
    return float((here - true).norm() / (true - begin).norm())


def resumed(spec, directory):
    """The end of a run that was left within an epoch and started again, beside that of one that was not."""
    learn(spec, 3, directory)
    os.environ[RESUME] = "1"
    try:
        again = learn(spec, None, directory)[0]
    finally:
        del os.environ[RESUME]
    return again, learn(spec)[0]


def skips_together():
    """With a loss scale that is too large at first: in which steps the model moved, and its hash at the end."""
    data = 100 * torch.randn(24, 40, generator=torch.Generator().manual_seed(3))
    moved, before = [], None
    with Run(seed=5, strategy="ddp:compress=powersgd", precision="fp16") as run:
        model = run.model(nn.Linear(40, 60))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
        batches = run.loader(data, global_batch=24, micro_batch=4)
        for _ in run.epochs(8):
            for batch in run.train(batches):
                run.step(model(batch).float().square().mean())
            before, after = state_hash(model), before
            moved.append(before != after)
        finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return moved[1:], before, finite


SPECS = ("ddp:compress=fp16", "ddp:compress=bf16", "ddp:compress=powersgd,rank=2,start=1")


@pytest.mark.campaign
def test_on_three_ranks():
    with tempfile.TemporaryDirectory() as root:
        calls = [
            (sums_of_ranks,),
            *((nothing_is_lost, rank) for rank in (1, 2)),
            (thin_sums_are_exact,),
            (sleepers_wake,),
            (starts_later,),
            (skipped_steps_leave_no_error,),
            (goes_on_exactly,),
            (moves_to_fewer_ranks,),
            (casts, "float16"),
            (casts, "bfloat16"),
            (casts_what_is_small_enough,),
            (skips_together,),
            *((same_again, spec) for spec in SPECS),
            *((ends_near, spec) for spec in SPECS),
            *((resumed, spec, os.path.join(root, str(i))) for i, spec in enumerate(SPECS)),
        ]
        found = dict(zip(calls, on_world(RANKS, calls), strict=True))
    for call, results in found.items():
        failed = [result for result in results if isinstance(result, str)]
        assert not failed, f"{call}: {failed[0]}"

    assert found[sums_of_ranks,] == [(True, True)] * RANKS
    for rank in (1, 2):
        (names, distance, sizes, hashes), *others = found[nothing_is_lost, rank]
        assert names == ["0.weight", "1.weight", "3.weight", "4.weight"][: 5 - rank]
        assert distance < 1e-4
        assert max(sizes[6:]) < 3 * max(sizes[:6]), "errors grow"
        assert {tuple(h) for *_, h in others} == {tuple(hashes)}
    assert max(found[thin_sums_are_exact,]) < 5e-3  # of sums up to 20
    assert max(found[sleepers_wake,]) < (False, 1e-3)
    assert found[starts_later,] == [[True, True, False, False]] * RANKS
    for told in found[skipped_steps_leave_no_error,]:
        assert told == [([True] * 10, False), ([False] * 10, True), ([True] * 10, False)]
    for ends, same_errors in found[goes_on_exactly,]:
        assert len(set(ends)) == 1
        assert same_errors
    assert found[moves_to_fewer_ranks,][2] is None
    for matrices, lost, restarted in found[moves_to_fewer_ranks,][:2]:
        assert matrices > 0
        assert lost < 1e-5
        assert restarted
    for name, digits in (("float16", 11), ("bfloat16", 8)):
        results = found[casts, name]
        assert 0 < results[0][0] < 16 * 2.0**-digits
        assert len({h for _, hashes, _ in results for h in hashes}) == 1
        assert results[0][2] == {"torch.float32"}
    assert {kept for kept, _ in found[casts_what_is_small_enough,]} == {3 * 2.0**100}
    assert {burst for _, burst in found[casts_what_is_small_enough,]} == {float("inf")}
    for moved, end, finite in found[skips_together,]:
        assert finite
        assert {False, True} == set(moved)
        assert end == found[skips_together,][0][1]
    for i, spec in enumerate(SPECS):
        assert len({h for hashes in found[same_again, spec] for h in hashes}) == 1
        assert 0 < max(found[ends_near, spec]) < (0.5 if "powersgd" in spec else 0.02)
        assert all(one == other for one, other in found[resumed, spec, os.path.join(root, str(i))])
