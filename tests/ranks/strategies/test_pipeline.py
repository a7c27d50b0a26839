"""Stages on ranks of their own; tests/promises/test_laws.py has what holds for every strategy."""

import itertools
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.distributed import HashStore
from torch.nn import functional as F

from campaign_marks import combinations
from device_costs import DEVICE, Costs
from lockstep.batch import BatchPlan, MicroBatchPosition
from lockstep.collectives import Connections, Group, open_all_reduce, open_group, single_rank_group
from lockstep.errors import SettingError
from lockstep.launch_contract import RESUME
from lockstep.run import Run
from lockstep.strategies import LossCall, StrategyContext
from lockstep.strategies.parts.buffers import Buffers
from lockstep.strategies.parts.random_state import random_state
from lockstep.strategies.pipelined.division import neighbours
from lockstep.strategies.pipelined.pipeline import Pipeline, schedule_runs
from lockstep.strategies.pipelined.random_states import RandomStates
from lockstep.strategies.pipelined.stage import (
    AutocastContext,
    Stage,
    StageInterface,
    StageMicroBatch,
    StageModules,
)
from lockstep.strategy_kinds import PipelineOptions
from lockstep.testing import run_each, run_ranks, state_hash
from lockstep.world import World
from residual import Residual
from worlds import on_world

pytestmark = pytest.mark.together  # what they compute once is computed on one worker

# ---- plans -----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9)), min_size=1, max_size=4),
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]),
    st.integers(2, 5),
)
def test_every_micro_batch_goes_through_one_schedule_that_takes_it(shapes, schedule, ranks):
    likes = [like for like, count in shapes for _ in range(count)]
    made = schedule_runs(likes, schedule, ranks)
    assert [i for p in made for i in range(p.first, p.first + p.length)] == list(range(len(likes)))
    for part in made:
        assert len(set(likes[part.first : part.first + part.length])) == 1
        if part.schedule == "1f1b":
            assert part.length >= ranks
        if part.schedule in ("interleaved", "zero-bubble"):
            assert part.length % max(1, part.length // ranks) == 0
        assert part.schedule in (schedule, "gpipe")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"schedule": "zigzag"}, "schedule='zigzag'; give one of gpipe, 1f1b, interleaved, zero-bubble, zbv"),
        ({"stages": -1}, "stages=-1, chunks=0; give numbers from 1"),
        ({"schedule": "gpipe", "chunks": 2}, "interleaved is for two chunks or more"),
        ({"schedule": "interleaved", "chunks": 1}, "interleaved is for two chunks or more"),
        ({"schedule": "zbv", "chunks": 3}, "zbv for two"),
        ({"sample": "32 by 8"}, "sample='32 by 8'; give a shape"),
        ({"sample": "32x8:complex"}, "give a shape"),
    ],
)
def test_options_that_make_no_sense_are_refused(told, words):
    with pytest.raises(SettingError, match=words):
        PipelineOptions(**told)


@given(st.integers(1, 12), st.integers(1, 12))
def test_neighbouring_stages_are_put_together_evenly(given, wanted):
    if given < wanted:
        with pytest.raises(SettingError, match="too few"):
            neighbours(given, wanted)
        return
    runs = neighbours(given, wanted)
    assert [place for run in runs for place in run] == list(range(given))
    assert len(runs) == wanted
    assert max(map(len, runs)) == -(-given // wanted)


# ---- a stage ---------------------------------------------------------------------------------------------------------


def middle_stage(device, states, *, draws_random):
    """The second of three stages, on ``device``, its layer, and a micro-batch that it computes."""
    graph = fx.Graph()
    inputs, passing = graph.placeholder("inputs"), graph.placeholder("passing")
    graph.output((graph.call_module("0", (inputs,)), passing))
    layer = nn.Sequential(nn.Linear(3, 3)).to(device)
    module = fx.GraphModule(layer, graph)
    buffers = Buffers(open_all_reduce(single_rank_group(), BatchPlan(1, 1, 1).run), single_rank_group())
    stage = Stage(
        1,
        3,
        StageModules(module, module, takes_inputs=True),
        lambda: True,
        buffers,
        states,
        list(layer.parameters()),
        AutocastContext(device, device, None),
        exact=True,
    )
    task = LossCall(layer, F.mse_loss, (torch.ones(2, 3, device=device),), (), lambda loss: loss)
    like = ((2, 3), torch.float32, True)
    micro = StageMicroBatch(task, None, MicroBatchPosition(0, 1, last=True), random_state(device))
    stage.begin_step([micro], [])
    stage.set_schedule_run([micro], tuple(StageInterface(specs, draws_random) for specs in ((like,), (like, like))))
    return stage, layer


def test_what_only_passes_through_gathers_no_hooks():
    """Torch receives into the same tensor in each step; hooks would stay on it, with numbers of other steps."""
    stage, layer = middle_stage(torch.device("cpu"), None, draws_random=False)
    received = torch.zeros(2, 3, requires_grad=True)
    made, passed = stage(received, index=torch.tensor(0))
    assert not received._backward_hooks
    (made.sum() + passed.sum()).backward()
    assert torch.equal(received.grad, torch.ones(2, 3))
    (sums,) = stage.sums.finish(1)
    assert [s.shape for s in sums] == [p.shape for p in layer.parameters()]


class Carried:
    """States of random generators that come from the stage before and go to the next."""

    def __init__(self, state):
        self.state, self.sent = state, []

    def receive(self, stage, micro_batch, like):
        assert (stage, micro_batch, like.shape) == (1, 0, self.state.shape)
        return self.state

    def send(self, stage, micro_batch, state):
        self.sent.append((stage, micro_batch, state.device.type))


def test_a_stage_that_draws_random_numbers_does_not_wait_for_the_device():
    states = Carried(random_state(DEVICE))
    stage, _ = middle_stage(DEVICE, states, draws_random=True)
    with Costs() as costs:
        sent = stage(torch.zeros(2, 3, device=DEVICE, requires_grad=True), index=torch.tensor(0))
    assert len(sent) == 2
    assert states.sent == [(1, 0, "cpu")]
    assert costs.waited == ["_local_scalar_dense"], "but for the index, which is on the CPU"


def states_that_arrive(rank_of):
    """What each stage but the first has received for two micro-batches, received in another order than sent."""
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 60)
    states, found = RandomStates(group, rank_of), {}
    own = [stage for stage, rank in enumerate(rank_of) if rank == group.rank]
    like = torch.zeros(9, dtype=torch.uint8)
    for stage in own:
        for micro_batch in range(2):
            if stage + 1 < len(rank_of):
                states.send(stage, micro_batch, like + 10 * stage + micro_batch)
    for stage in reversed(own):
        for micro_batch in (1, 0):
            if stage:
                found[stage, micro_batch] = states.receive(stage, micro_batch, like).tolist()
    states.finish()
    group.close()
    return found


@pytest.mark.parametrize("rank_of", [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0)])
def test_each_stage_gets_the_random_state_of_its_micro_batch(rank_of):
    found = {place: state for each in run_ranks(states_that_arrive, 2, rank_of) for place, state in each.items()}
    stages = range(1, len(rank_of))
    assert found == {(stage, m): [10 * (stage - 1) + m] * 9 for stage in stages for m in range(2)}


@pytest.mark.parametrize(("over_cpu", "backends"), [(True, ["gloo"]), (False, ["nccl", "nccl"])])
def test_what_stages_send_over_nccl_has_connections_of_its_own(over_cpu, backends):
    """The world's group over NCCL would send and receive in one order."""
    asked = []

    class Asked(Connections):
        def take(self, members, backend, timeout_s):
            asked.append(backend)

    world = World(0, 2, 0, 2, 0, 1, port=1)
    group = Group(world, DEVICE, HashStore(), None, 1, nodes=(0, 0), over_cpu=over_cpu, connections=Asked())
    Pipeline(StrategyContext(group, lambda *_: range(2)), PipelineOptions(), 2)
    assert sorted(asked) == sorted([*backends, "gloo"])  # the last one for what is no tensor


# ---- on ranks --------------------------------------------------------------------------------------------------------

#: Steps of 16, 16 and 2. With micro-batches of 3 the last one of a step is shorter, and in the last step one of two
#: replicas has none.
SAMPLES = 34


def images(samples=SAMPLES):
    random = torch.Generator().manual_seed(1)
    return torch.randn(samples, 3, 5, 5, generator=random), torch.randint(5, (samples,), generator=random)


def other_images():
    """Steps of 16 and 15, so that the second replica computes as many micro-batches in both, but others of the step."""
    return images(31)


def whole(run, model):
    """The whole model's state, from the ranks that hold its parts."""
    here = {n.removeprefix("module."): t for n, t in model.state_dict().items() if not t.is_meta}
    found = {}
    for name, tensor in itertools.chain.from_iterable(each.items() for each in run.gather(here)):
        assert state_hash(found.setdefault(name, tensor)) == state_hash(tensor), f"replicas differ in {name}"
    return found


def loss_of(outputs, labels):
    return F.cross_entropy(outputs["out"], labels)


def trained(spec, make=Residual, data=images, loss=loss_of, told=None, compiled=False, counted=False, **adopted):
    """The hash of the model and the mean losses after two epochs of uneven steps."""
    with Run(seed=4, strategy=spec, **(told or {})) as run:
        model = run.model(make(), **adopted)
        if compiled:
            model.compile(backend="eager")
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        batches = run.loader(data(), global_batch=16, micro_batch=3)
        losses = []
        for _ in run.epochs(2):
            for *inputs, target in run.train(batches):
                run.step(loss, tuple(inputs), target, count=len(target) if counted else None)
            losses.append(run.metrics["loss"])
        return state_hash(whole(run, model)), losses


class Decoder(nn.Module):
    """Two inputs; random numbers in two places; a parameter outside of any module, and nothing before it is trained."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8).requires_grad_(False)
        self.positions = nn.Parameter(torch.zeros(6, 8))
        self.early, self.mix = nn.Dropout(0.3), nn.Linear(8, 8).requires_grad_(False)
        self.drop = nn.Dropout(0.3)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 11)

    def forward(self, tokens, mask):
        x = self.mix(self.early(self.tokens(tokens))) * mask.unsqueeze(-1)
        return self.out(self.norm(self.drop(x) + self.positions))


def texts():
    random = torch.Generator().manual_seed(2)
    tokens = torch.randint(11, (SAMPLES, 6), generator=random)
    return tokens, (tokens > 3).float(), tokens.flip(1)


def loss_of_text(outputs, tokens):
    return F.cross_entropy(outputs.transpose(1, 2), tokens)


class Partial(nn.Module):
    """A layer that no loss depends on."""

    def __init__(self):
        super().__init__()
        self.a, self.idle, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.a(x)
        self.idle(x)
        return self.b(x)


def rows():
    random = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, 4, generator=random), torch.randn(SAMPLES, 2, generator=random)


def idle_behind():
    return nn.Sequential(nn.Linear(4, 2), nn.Sigmoid())


def doubles():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def double_rows():
    return tuple(tensor.double() for tensor in rows())


class Lift(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 16), nn.BatchNorm1d(8)

    def forward(self, x):
        return torch.relu(self.norm(self.layer(x).view(-1, 8, 2))), x[:, :1]


class Mix(nn.Module):
    """What it does depends on a value, which torch.fx cannot follow."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop, self.scale = nn.Linear(16, 16), nn.Dropout(0.3), nn.Parameter(torch.randn(16))

    def forward(self, x, skip):
        x = x.flatten(1)
        x = x + self.layer(x) * self.scale if x.mean() > 0.4 else self.layer(x) - x * self.scale
        return self.drop(x), skip


class Turn(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x, skip):
        return self.norm(x.view(-1, 2, 8)).view(-1, 16), skip


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 2)

    def forward(self, x, skip):
        return self.out(x) + skip


def given_stages():
    return [Lift(), Mix(), Turn(), Head()]


def makers():
    def on_meta():
        with torch.device("meta"):
            return Head()

    return [Lift, Mix, Turn, on_meta]


TEXT = {"make": Decoder, "data": texts, "loss": loss_of_text}
ROWS = {"make": Partial, "data": rows, "loss": F.mse_loss}
REFERENCES = {
    "images": {},
    "bf16": {"told": {"precision": "bf16"}},
    "fp16": {"told": {"precision": "fp16"}},
    "clipped": {"told": {"clip_norm": 0.1}},
    "text": TEXT,
    "unused": ROWS | {"find_unused_parameters": True},
    "compiled": {"compiled": True},
    "idle": ROWS | {"make": idle_behind, "counted": True, "told": {"precision": "fp16", "clip_norm": 0.1}},
    "doubles": {"make": doubles, "data": double_rows, "loss": F.mse_loss},
    "shifted": {"data": other_images},
    "given": ROWS | {"make": given_stages},
    "made": ROWS | {"make": makers, "told": {"clip_norm": 0.1}},
}
#: By the size of the world: the strategy, and what is trained.
SAME = {
    2: [
        ("pipeline:cut=norm", "images"),
        ("pipeline:cut=body.1", "bf16"),
        ("pipeline:cut=body.1,schedule=gpipe", "fp16"),
        ("pipeline:cut=drop", "text"),
        ("pipeline:sample=6x3x5x5", "images"),
        ("pipeline", "unused"),
        ("pipeline:cut=body.1", "compiled"),
        ("pipeline:cut=1", "idle"),
        ("pipeline:cut=2", "doubles"),
        ("pipeline:schedule=zero-bubble,cut=norm", "images"),
        ("pipeline:schedule=zbv,cut=body.1+norm+head", "bf16"),
        ("pipeline", "given"),
        ("pipeline:schedule=interleaved", "made"),
        ("pipeline:schedule=zero-bubble,chunks=2", "given"),
        ("pipeline:schedule=zbv", "made"),
        ("ddp", "made"),
    ],
    3: [
        ("pipeline:cut=body.1+head", "images"),
        ("pipeline:cut=body.1+norm", "clipped"),
    ],
    4: [
        ("pipeline:stages=2,cut=body.1", "images"),
        ("pipeline:stages=2,cut=norm", "clipped"),
        ("pipeline:stages=2,schedule=interleaved,cut=body.1+norm+head", "images"),
        ("pipeline:stages=2,schedule=interleaved,cut=body.2+norm+head", "shifted"),
        ("pipeline:schedule=gpipe,cut=body.1+norm+head", "bf16"),
        ("pipeline:stages=2,cut=drop", "text"),
        ("pipeline:stages=2", "unused"),
        ("pipeline:stages=2,schedule=zbv", "given"),
        ("pipeline:schedule=zero-bubble", "made"),
    ],
}


def trained_as(spec, name):
    return trained(spec, **REFERENCES[name])


@pytest.fixture(scope="module")
def references():
    names = list(REFERENCES)
    return dict(zip(names, on_world(1, [(trained_as, "none", name) for name in names]), strict=True))


@pytest.mark.parametrize("size", combinations(SAME, campaign=lambda size: size in (2, 3)))
def test_any_cut_gives_the_bits_of_one_rank(size, references):
    found = on_world(size, [(trained_as, spec, name) for spec, name in SAME[size]])
    for (spec, name), each in zip(SAME[size], found, strict=True):
        assert each == references[name] * size, (spec, name, each, references[name])


def near(spec):
    with Run(seed=4, strategy=spec, reduction="fast") as run:
        model = run.model(Residual())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        batches = run.loader(images(), global_batch=16, micro_batch=3)
        drawn = []
        for _ in run.epochs(2):
            for x, labels in run.train(batches):
                run.step(loss_of, x, labels)
                drawn.append(float(torch.rand(())))
        return whole(run, model), drawn


def test_a_fast_reduction_comes_near():
    ((reference, _),) = on_world(1, [(near, "none")])[0]
    ranks = on_world(4, [(near, "pipeline:stages=2,cut=body.1")])[0]
    drawn = [each for _, each in ranks]
    assert drawn[0] == drawn[1]  # what a script draws is the same on all ranks of a replica, also after a step
    assert drawn[2] == drawn[3]
    for found, _ in ranks:
        assert found.keys() == reference.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, reference[name], rtol=1e-4, atol=1e-6, msg=name)


def evaluated(spec):
    """What each rank sees of the model, before and after training, and of where its parameters lie."""
    with Run(seed=4, strategy=spec) as run:
        plain = Residual()
        bytes_whole = sum(p.numel() for p in plain.parameters())
        names = [n for n, _ in plain.named_parameters()]
        model = run.model(plain)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        batches = run.loader(images(), global_batch=16, micro_batch=3)
        held_out = run.loader((images()[0], torch.arange(SAMPLES)), global_batch=20, shuffle=False)
        seen = {}
        for _ in run.epochs(1):
            for x, labels in run.train(batches):
                with torch.no_grad():
                    model(x)  # also in training, where nothing is to be learnt of it
                run.step(loss_of, x, labels)
            for x, numbers in run.evaluate(held_out):
                output = model(x)
                run.measure(number=numbers, size=float(output["size"]))
                seen |= dict(zip(numbers.tolist(), output["out"], strict=True))
        held = [p for p in model.parameters() if not p.is_meta]
        assert [n for n, _ in model.named_parameters()] == names
        assert model is plain
        return seen, run.metrics, sum(p.numel() for p in held) / bytes_whole, state_hash(whole(run, model))


def on_one_rank():
    with Run(seed=4, strategy="none") as run:
        model = run.model(Residual())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        batches = run.loader(images(), global_batch=16, micro_batch=3)
        for _ in run.epochs(1):
            for x, labels in run.train(batches):
                run.step(loss_of, x, labels)
        return dict(enumerate(model.eval()(images()[0])["out"].detach()))


def test_in_evaluation_every_rank_of_a_replica_sees_the_model():
    (expected,) = on_world(1, [(on_one_rank,)])[0]
    found = on_world(4, [(evaluated, "pipeline:stages=2,cut=body.1")])[0]
    (first, metrics, *_), (second, *_), (third, *_), (fourth, *_) = found
    assert state_hash(first) == state_hash(second)
    assert state_hash(third) == state_hash(fourth)
    assert first.keys() | third.keys() == expected.keys()
    for number, row in (first | third).items():
        torch.testing.assert_close(row, expected[number], rtol=1e-5, atol=1e-6)
    assert metrics["number"] == sum(range(SAMPLES)) / SAMPLES  # each sample counts once
    assert all(each[1] == metrics for each in found)
    shares = [each[2] for each in found]
    assert shares[0] == shares[2]
    assert shares[0] + shares[1] == pytest.approx(1.0)
    assert 0 < shares[0] < 1


def resumed(spec, place, epochs):
    """As if it had gone on: the hash of the model, and the loss of the last epoch."""
    with Run(seed=4, strategy=spec, checkpoint=place) as run:
        model = run.model(makers())
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        batches = run.loader(rows(), global_batch=16, micro_batch=3)
        for _ in run.epochs(epochs):
            for x, y in run.train(batches):
                run.step(F.mse_loss, x, y)
            for x, y in run.evaluate(batches):
                run.measure(away=F.mse_loss(model(x), y))
        run.save(model, f"{place}/model.pt")
        return state_hash(whole(run, model)), run.metrics["loss"], run.metrics["away"]


def test_given_stages_move_between_strategies(tmp_path):
    place, other = str(tmp_path / "moved"), str(tmp_path / "stayed")
    (reference,) = run_ranks(resumed, 1, "none", other, 2)
    run_ranks(resumed, 2, "pipeline:schedule=zbv", place, 1)
    found = run_ranks(resumed, 2, "pipeline", place, 2, env={RESUME: "1"})
    assert [each[:2] for each in found] == [reference[:2]] * 2
    assert found[0][2] == pytest.approx(reference[2])
    saved, expected = (torch.load(f"{directory}/model.pt") for directory in (place, other))
    assert list(saved) == list(expected)
    assert state_hash(saved) == state_hash(expected)


# ---- guards ----------------------------------------------------------------------------------------------------------


class Growing(nn.Module):
    """What it hands on has another shape in each pass, though its input has not."""

    def __init__(self):
        super().__init__()
        self.schedule_runs = 0
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        self.schedule_runs += 1
        return self.layer(x).repeat(1, 1 + (self.schedule_runs > 3))


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x):
        return self.layer(x.sum(1, keepdim=True))


class Failing(nn.Module):
    def forward(self, x):
        raise ZeroDivisionError("in the user's module")


class Listing(nn.Module):
    def forward(self, x):
        return [x]


class First(nn.Module):
    def forward(self, values):
        return values[0]


def refused(spec, layers, *, loss=F.mse_loss, told=None, hand_over=True, twice=False):
    """What each rank says about a training that cannot be."""
    try:
        with Run(seed=4, strategy=spec, **(told or {})) as run:
            model = run.model(layers())
            if twice:
                run.model(layers())
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
            batches = run.loader(rows(), global_batch=16, micro_batch=4)
            for _ in run.epochs(1):
                for x, y in run.train(batches):
                    if hand_over:
                        run.step(loss, x, y)
                    else:
                        run.step(loss(model(x), y))
    except Exception as error:  # noqa: BLE001 - the test will read it
        torch.distributed.destroy_process_group() if torch.distributed.is_initialized() else None
        return f"{type(error).__name__}: {error}"
    return "nothing"


def linears():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def synchronised():
    return nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.Linear(4, 2))


def growing():
    return nn.Sequential(Growing(), Sum())


def failing():
    return nn.Sequential(nn.Linear(4, 2), Failing())


def listing():
    return nn.Sequential(nn.Linear(4, 2), Listing(), First(), nn.Linear(2, 2))


def frozen_before():
    return [nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)]


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

    def forward(self, x):
        for _ in range(2):
            x = x + self.layer(x) * self.scale
        return x


def repeated():
    return [nn.Linear(4, 2), Repeated()]


def tied():
    layer = nn.Linear(4, 4)
    return [layer, nn.Sequential(layer, nn.Linear(4, 2))]


def tied_by_functions():
    layer = nn.Linear(4, 4)
    return [lambda: layer, lambda: nn.Sequential(layer, nn.Linear(4, 2))]


def mixed():
    return [nn.Linear(4, 4), linears]


def no_stages():
    return [Turn, lambda: 3]


def without_mean(outputs, targets):
    return F.mse_loss(outputs, targets, reduction="none")


def refused_as(number):
    spec, layers, told, _ = GUARDS[number]
    return refused(spec, layers, **told)


def failed_as(number):
    spec, layers, told, *_ = FAULTS[number]
    return refused(spec, layers, **told)


GUARDS = [
    ("pipeline:stages=4", linears, {}, "SettingError: strategy pipeline: stages=4 does not divide 2 ranks"),
    ("pipeline:stages=1", linears, {}, "SettingError: strategy pipeline: stages=1 cuts nothing"),
    ("pipeline:cut=1+2", linears, {}, "makes 3 stages of 2; name 1 module"),
    ("pipeline:chunks=2,schedule=interleaved", linears, {}, "Sequential calls 3 modules, too few for 4 stages"),
    ("pipeline", synchronised, {}, "SettingError: strategy=pipeline: SyncBatchNorm would wait"),
    ("pipeline", linears, {"twice": True}, "UsageError: strategy=pipeline: run.model(...) was called twice"),
    ("pipeline", linears, {"hand_over": False}, "UsageError: strategy=pipeline computes the loss itself"),
    ("pipeline:schedule=interleaved", frozen_before, {}, "2 stages in run.model([...]), too few for 4"),
    ("pipeline", tied, {}, "are one tensor in stages 1 and 0, and each lies on one rank"),
    ("pipeline", tied_by_functions, {}, "SettingError: strategy pipeline: 1.0.weight and 0.weight are one tensor, of"),
    ("pipeline", no_stages, {}, "UsageError: run.model(...) was given a function that returns a int"),
    ("pipeline:cut=1", frozen_before, {}, "this one was given as stages; leave them out"),
    ("pipeline", mixed, {}, "UsageError: run.model([Linear, function]): give stages that are modules, or one function"),
    ("pipeline:schedule=zero-bubble", linears, {"told": {"compile": True}}, "cannot split the backward pass"),
]
#: Met by one rank, on which its peers then wait in vain.
FAULTS = [
    ("pipeline:cut=1", growing, {}, 0, "UsageError: strategy=pipeline: what stage 0 returns has shapes [(4, 8)]"),
    ("pipeline:cut=2", listing, {}, 0, "UsageError: strategy=pipeline: stage 0 returns a list, and only a tensor"),
    ("pipeline:cut=1", failing, {}, 1, "ZeroDivisionError: in the user's module"),
    ("pipeline:schedule=zero-bubble", repeated, {}, 1, "stage 1 uses some parameters several times in a forward pass"),
    (
        "pipeline:cut=1",
        linears,
        {"loss": without_mean},
        1,
        "UsageError: step(loss function, ...): it gave a tensor of ",
    ),
    (
        "pipeline:schedule=zero-bubble",
        frozen_before,
        {},
        1,
        "UsageError: strategy=pipeline: 2 parameters of stage 1 have a part in the loss that does not go through",
    ),
]


def test_what_cannot_be_trained_is_refused_on_every_rank():
    found = on_world(2, [(refused_as, number) for number in range(len(GUARDS))])
    for (spec, _, _, words), each in zip(GUARDS, found, strict=True):
        assert [words in said for said in each] == [True, True], (spec, words, each)


@pytest.mark.parametrize("number", combinations(range(len(FAULTS)), campaign=lambda number: number == 3))
def test_what_one_rank_meets_is_told_by_it(number):
    *_, rank, words = FAULTS[number]
    said = [outcome.value for outcome in run_each(failed_as, 2, number, env={"LOCKSTEP_PEER_TIMEOUT_S": "20"})]
    assert words in said[rank]
    assert said[1 - rank].startswith("PeerLost: another rank exited or stopped responding during ")
