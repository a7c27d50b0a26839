"""Servers own the parameters: the bits of one rank where they wait for all, and each push counted once where not."""

import contextlib
import io
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.batch import MicroBatchPosition
from lockstep.collectives import Mailbox, fold, open_group, single_rank_group
from lockstep.errors import PeerLost, SettingError, UsageError
from lockstep.heartbeat import progress_marker
from lockstep.launch_contract import EXIT_STOPPED, RESUME, STOP_FILE
from lockstep.run import Run
from lockstep.strategies import StrategyContext, open_strategy
from lockstep.strategies.parameter_server.flat_buckets import flat_buckets_of
from lockstep.strategies.parameter_server.served_strategy import Push, ServerRoles
from lockstep.strategies.parts.gradient_accumulation import ParameterSet, TreeGradientAccumulator
from lockstep.strategies.replicated.single_process import SingleProcess
from lockstep.strategy_kinds import ParameterServerOptions
from lockstep.testing import run_each, run_ranks, state_hash
from lockstep.world import World
from parameter_server_loops import classify
from worlds import on_world

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=6)
TYPES = (torch.float32, torch.float64)


@given(SHAPES, st.data())
def test_each_tensor_is_in_one_bucket_and_comes_back_from_it(shapes, data):
    tensors = [torch.randn(shape).to(data.draw(st.sampled_from(TYPES))) for shape in shapes]
    owners = [data.draw(st.integers(0, 2)) for _ in tensors]
    buckets = flat_buckets_of(tensors, owners)
    assert len({(bucket.owner, bucket.tensors[0].dtype) for bucket in buckets}) == len(buckets)
    owner_of = dict(zip(map(id, tensors), owners, strict=True))
    assert sorted(owner_of) == sorted(id(t) for bucket in buckets for t in bucket.tensors)
    for bucket in buckets:
        assert {owner_of[id(t)] for t in bucket.tensors} == {bucket.owner}
        values = [torch.randn_like(t) for t in tensors]
        flat = bucket.pack(values)
        own = [values[place] for place in bucket.places]
        assert all(torch.equal(a, b) for a, b in zip(bucket.unpack(flat), own, strict=True))
        bucket.fill(flat)
        assert torch.equal(bucket.values(), flat)


@given(st.integers(1, 9), st.data())
def test_what_workers_push_folds_to_the_tree_of_one_rank(micro_batches, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, micro_batches), max_size=3)))
    runs = [range(a, b) for a, b in zip([0, *cuts], [*cuts, micro_batches], strict=True)]
    gradients = torch.randn(micro_batches, 5, generator=torch.Generator().manual_seed(micro_batches))

    def pushed(run):
        parameter = nn.Parameter(torch.zeros(5))
        sums = TreeGradientAccumulator(ParameterSet((parameter,), everything=True), micro_batches)
        for index in run:
            parameter.grad = gradients[index].clone()
            sums.accumulate(MicroBatchPosition(index, micro_batches, last=index == run[-1]))
            assert parameter.grad is None
        return sums.tree.nodes, [row for (row,) in sums.tree.sums]

    def whole(run):
        pushes = [pushed(one) for one in run]
        nodes, rows = ([value for push in pushes for value in push[kind]] for kind in (0, 1))
        return fold(micro_batches, nodes, rows, torch.add)

    assert torch.equal(whole(runs), whole([range(micro_batches)]))


@pytest.mark.parametrize(
    ("ranks", "serving", "says"),
    [(2, 2, "servers=2 of 2 ranks: give at least one, and leave at least one to work"), (3, 0, "servers=0 of 3")],
)
def test_somebody_works_and_somebody_serves(ranks, serving, says):
    with pytest.raises(SettingError, match=says):
        ServerRoles(ranks, serving)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"mode": "hogwild"}, "mode='hogwild'; give sync or async"),
        ({"staleness": 2}, "staleness=2, mode=sync; give a number from 0, with mode=async"),
        ({"mode": "async", "staleness": -1}, "staleness=-1, mode=async; give"),
    ],
)
def test_bad_options_are_refused(words, says):
    with pytest.raises(SettingError, match=says):
        ParameterServerOptions(**words)


def test_one_rank_alone_needs_no_server():
    assert isinstance(
        open_strategy("parameter-server", StrategyContext(single_rank_group(), lambda rank, of: range(of))),
        SingleProcess,
    )


# ---- on ranks --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """With what a strategy may stumble over: buffers, noise, a frozen part, one that is never used, two types."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.noise = nn.Dropout(0.2)
        self.second = nn.Linear(16, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.never = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        hidden = self.noise(torch.relu(self.norm(self.first(x))))
        return self.frozen(self.second(hidden)) * self.scale.to(x.dtype)


def learn(word, optimizer="sgd", epochs=2, *, counted=False, **settings):
    """The model's hash, what was measured, and for how many parameters this rank's optimizer remembers something."""
    with Run(seed=3, strategy=word, **settings) as run:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(60, 6, generator=generator)
        y = torch.randint(0, 4, (60,), generator=generator)
        net = Net()
        model = run.model(net)
        make = {"sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "adamw": lambda p: torch.optim.AdamW(p, 0.02)}
        steps = run.optimizer(make[optimizer](model.parameters()))
        run.scheduler(torch.optim.lr_scheduler.StepLR(steps, 2))
        told = classify(run, model, x, y, epochs, counted=counted)
        return state_hash(net), told, len(steps.state)


CASES = [
    ("sgd", {"clip_norm": 0.5}),
    ("adamw", {"precision": "bf16"}),
    ("sgd", {"counted": True}),
]


@pytest.mark.parametrize(("ranks", "servers"), [(2, 1), pytest.param(4, 1, marks=pytest.mark.campaign), (5, 3)])
def test_the_bits_are_those_of_one_rank_on_every_rank(ranks, servers):
    word = f"parameter-server:servers={servers}"
    found = on_world(ranks, [(told, word, optimizer, case) for optimizer, case in CASES])
    for results, (optimizer, case) in zip(found, CASES, strict=True):
        single_rank_group = learn("none", optimizer, **case)
        assert [one[:2] for one in results] == [single_rank_group[:2]] * ranks, (optimizer, case)
        remembered = [count for _, _, count in results]
        assert remembered[:-servers] == [0] * (ranks - servers), "workers remember nothing"
        assert sum(remembered) == single_rank_group[2]
        assert all(remembered[-servers:])


def told(word, optimizer, case):
    return learn(word, optimizer, **case)


def few_parameters(word):
    with Run(seed=3, strategy=word) as run:
        model = run.model(nn.Linear(3, 1, bias=False))
        run.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        batches = run.loader((torch.ones(16, 3),), global_batch=8, micro_batch=1)
        for _ in run.epochs(1):
            for (x,) in run.train(batches):
                run.step(model(x).square().mean())
        return state_hash(model)


def test_a_server_may_own_nothing():
    assert on_world(4, [(few_parameters, "parameter-server:servers=2")])[0] == [few_parameters("none")] * 4


def fast(word):
    return learn(word, reduction="fast")[1]


def test_fast_sums_are_near():
    for metrics in on_world(3, [(fast, "parameter-server")])[0]:
        for here, there in zip(metrics, learn("none")[1], strict=True):
            assert here == pytest.approx(there, rel=1e-4)


def traffic():
    """Bytes of tensors that this rank laid before servers, and that it got back, in one step."""
    sent, got = [], []
    send, receive = Mailbox.send, Mailbox.receive

    def sending(self, rank, message, what):
        if isinstance(message, Push):
            sent.append(sum(t.numel() * t.element_size() for flats in message.sums for t in flats))
        return send(self, rank, message, what)

    def receiving(self, *args, **kwargs):
        rank, message = receive(self, *args, **kwargs)
        if isinstance(message, list):
            got.append(sum(t.numel() * t.element_size() for t in message))
        return rank, message

    with Run(strategy="parameter-server:servers=2") as run:
        model = run.model(nn.Linear(100, 10))
        run.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        Mailbox.send, Mailbox.receive = sending, receiving
        for (x,) in run.train(run.loader((torch.ones(6, 100),), global_batch=6, micro_batch=1)):
            run.step(model(x).mean())
        Mailbox.send, Mailbox.receive = send, receive
        return sum(sent), sum(got)


def test_the_traffic_is_that_of_the_formula():
    m = 4 * 1010
    # Six micro-batches as two threes: each half of the tree is one node. Servers send nothing of their own accord.
    assert on_world(4, [(traffic,)])[0] == [(m, m), (m, m), (0, 0), (0, 0)]


def resumed(word, place, epochs):
    return learn(word, "adamw", epochs, checkpoint=place)[:2]


def test_a_resumed_run_may_have_another_number_of_servers(tmp_path):
    whole = learn("none", "adamw", 3)[:2]
    place = str(tmp_path)
    run_ranks(resumed, 3, "parameter-server:servers=1", place, 1)
    run_ranks(resumed, 4, "parameter-server:servers=2", place, 2, env={RESUME: "1"})
    (end,) = run_ranks(resumed, 1, "none", place, 3, env={RESUME: "1"})
    assert end == (whole[0], whole[1][2:])


def refused(word, **settings):
    with Run(strategy=word, **settings):
        pass


def apart():
    with Run(strategy="parameter-server") as run:
        one, other = run.model(nn.Linear(2, 2)), run.model(nn.Linear(2, 2))
        first = run.optimizer(torch.optim.SGD(one.parameters(), 0.1))
        second = run.optimizer(torch.optim.SGD(other.parameters(), 0.1))
        for (x,) in run.train(run.loader((torch.ones(8, 2),), global_batch=8, micro_batch=2)):
            run.step(one(x).mean(), optimizer=first)
            run.step(other(x).mean(), optimizer=second)


def sparse():
    with Run(strategy="parameter-server") as run:
        model = run.model(nn.Embedding(9, 2, sparse=True))
        run.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        for (x,) in run.train(run.loader((torch.arange(8),), global_batch=8, micro_batch=2)):
            run.step(model(x).mean())


def half():
    refused("parameter-server", precision="fp16")


def all_serve():
    refused("parameter-server:servers=2")


@pytest.mark.parametrize(
    ("case", "kind", "says"),
    [
        (half, SettingError, "strategy parameter-server with precision='fp16': "),
        (all_serve, SettingError, "servers=2 of 2 ranks: "),
        (apart, UsageError, "servers make one update in each step, and this loss is for some of the parameters only"),
        (sparse, UsageError, r"weight has sparse=True, and strategy parameter-server moves dense gradients"),
    ],
)
def test_what_cannot_be_served_is_refused(case, kind, says):
    with pytest.raises(kind, match=says):
        run_ranks(case, 2)


# ---- asynchronous ----------------------------------------------------------------------------------------------------


def count_pushes(word, place):
    """Each gradient is known whatever the parameters are; so the sum of all updates tells which pushes were applied."""
    with Run(seed=1, strategy=word, checkpoint=place) as run:
        model = run.model(nn.Linear(1, 1))
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        data = run.loader((2.0 ** torch.arange(16.0)[:, None],), global_batch=4, micro_batch=1)
        for _ in run.epochs(1):
            for (x,) in run.train(data):
                run.step(model(x).mean())
        return model.weight.item(), model.bias.item()


def test_every_push_is_applied_exactly_once(tmp_path):
    found = run_ranks(count_pushes, 4, "parameter-server:servers=2,mode=async", str(tmp_path))
    # Two workers with two samples of four each: a push is half the sum of its two, and the bias counts the pushes.
    assert found == [(-(2**16 - 1) / 2, -8.0)] * 4


def goes_down(word):
    """The loss and the outputs of each epoch, and what was said at the end."""
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        _, metrics, _ = learn(word, epochs=8, clip_norm=5.0)
    said = [line for line in heard.getvalue().splitlines() if line.startswith("asynchronous: ")]
    return [m["loss"] for m in metrics], [m["out"] for m in metrics], said


def same_everywhere(word):
    return learn(word, counted=True)[0]


@pytest.mark.parametrize("more", ["", ",staleness=0"])
def test_asynchronous_training_learns_and_ends_with_one_model(more):
    word = f"parameter-server:servers=2,mode=async{more}"
    told, hashes = on_world(4, [(goes_down, word), (same_everywhere, word)])
    assert len(set(hashes)) == 1
    losses, outs, (said,) = told[0]
    assert all(one[:2] == (losses, outs) for one in told)
    assert losses[-1] < losses[0]
    # 24 steps of 2 workers, pushed to 2 servers each.
    assert said.startswith("asynchronous: 96 updates on 2 servers; gradients were ")
    # Of the workers' first pushes, all from the first parameters, each but one is late.
    assert said.endswith(", 1 at most") if more else not said.endswith(", 0 at most")


def side_by_side(word, place):
    """How far ahead of the other worker each was seen to be; with a limit, and where one waits for the other."""
    with Path(place, "steps").open("r+b") as file, mmap.mmap(file.fileno(), 0) as steps, Run(strategy=word) as run:
        model = run.model(nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        data = run.loader((torch.ones(80, 1),), global_batch=4, micro_batch=1)
        ahead, meeting = [], {0: 3, 1: 12}.get(run.rank) if "staleness" not in word else None
        for (x,) in run.train(data):
            run.step(model(x).mean())
            steps[run.rank] = run.progress.step
            ahead.append(steps[run.rank] - steps[1 - run.rank])
            if run.progress.step == meeting:
                Path(place, "go").open("w" if run.rank else "r").close()  # returns when both have come
                meeting = None
        return max(ahead, default=0)


def test_nobody_waits_unless_told_how_far_ahead_one_may_be(tmp_path):
    os.mkfifo(tmp_path / "go")
    found = []
    for word in ("parameter-server:mode=async", "parameter-server:mode=async,staleness=1"):
        (tmp_path / "steps").write_bytes(bytes(2))
        found.append(run_ranks(side_by_side, 3, word, str(tmp_path)))
    free, bound = found
    assert free[1] >= 9
    # One more than the limit can be seen: what the other one has pushed, it may not have written down yet.
    assert max(bound) <= 2


# ---- loops that are left ---------------------------------------------------------------------------------------------


def leave(word, at, place=None):
    """The model's hash, metrics and progress at the ends of two epochs, of which the first one's loop is left."""
    with Run(seed=3, strategy=word, checkpoint=place, replay=False) as run:  # the script counts micro-batches
        generator = torch.Generator().manual_seed(5)
        x, y = torch.randn(60, 6, generator=generator), torch.randint(0, 4, (60,), generator=generator)
        net = Net()
        model = run.model(net)
        run.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        batches = run.loader((x, y), global_batch=24, micro_batch=3)
        told = []
        for epoch in run.epochs(2):
            seen = -1  # micro-batches since the step at which to leave
            for a, b in run.train(batches):
                seen += epoch == 0 and run.progress.step == at[0]
                if seen == at[1] > 0:
                    break
                run.step(F.cross_entropy(model(a), b))
                if epoch == at[1] == 0 and run.progress.step == at[0]:
                    break
            for a, b in run.evaluate(batches):
                run.measure(right=model(a).argmax(1) == b)
            told.append((dict(run.metrics), run.progress))
        with pytest.raises(UsageError, match="outside of"):
            run.step(torch.ones(()))
    return state_hash(net), told


#: After how many steps, and how many micro-batches of the next one; the third step is the epoch's last.
LEFT = [(1, 0), (2, 0), (2, 1), (3, 0)]


def test_servers_leave_the_loop_with_the_workers(tmp_path):
    places = [str(tmp_path / str(number)) for number in range(len(LEFT))]
    found = on_world(3, [(leave, "parameter-server", at, place) for at, place in zip(LEFT, places, strict=True)])
    for at, results in zip(LEFT, found, strict=True):
        single_rank_group = leave("none", at)
        assert "loss" not in single_rank_group[1][0][0], "what was measured in a loop that was left is not told"
        assert results == [single_rank_group] * 3, at


def test_asynchronous_servers_leave_the_loop_with_the_workers():
    words = ["parameter-server:servers=2,mode=async", "parameter-server:servers=2,mode=async,staleness=0"]
    found = on_world(4, [(leave, word, at) for word, at in zip([*words, *words], LEFT, strict=True)])
    for at, results in zip(LEFT, found, strict=True):
        assert results == [results[0]] * 4, at
        assert [progress.step for _, progress in results[0][1]] == [at[0], at[0] + 3]


def falls_out(word, how, place):
    """One worker, or all, leave at the second step in some other way than by ``break``."""
    with Run(strategy=word, peer_timeout_s=100, checkpoint=place) as run:
        model = run.model(nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        for (x,) in run.train(run.loader((torch.ones(8000, 1),), global_batch=4, micro_batch=1)):
            run.step(model(x).mean())
            if run.progress.step == 2 and how == "stop":
                Path(place, STOP_FILE).touch()
            if run.progress.step == 2 and run.rank == 1 and how == "alone":
                break
            if run.progress.step == 2 and how == "error":
                raise ValueError("of the user")


@pytest.mark.parametrize("word", ["parameter-server", "parameter-server:mode=async,staleness=1"])
def test_nothing_hangs_where_the_loop_is_left_otherwise(word, tmp_path):
    single_rank_group, error, stop = (
        run_each(falls_out, 3, word, how, str(tmp_path / how), timeout_s=40) for how in ("alone", "error", "stop")
    )
    assert str(single_rank_group[2].error) == (
        "rank 1 left the loop over micro-batches before its end, and other workers did not; "
        "leave it on all of them after the same step"
    )
    assert all(isinstance(one.error, PeerLost) for one in single_rank_group)
    assert "of the user" in [str(one.error) for one in error[:2]]
    assert all(isinstance(one.error, PeerLost) or str(one.error) == "of the user" for one in error)
    assert [one.error.code for one in stop] == [EXIT_STOPPED] * 3


def leaves_letters():
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 100)
    line = Mailbox(group, [1], []) if group.leads else Mailbox(group, [], [0])
    for _ in range(40 if group.leads else 0):
        line.send(1, "", "a letter")
    group.barrier("letters have come")
    line.close()
    group.close()


def test_the_end_does_not_wait_for_letters_that_nobody_takes():
    assert run_ranks(leaves_letters, 2, timeout_s=30) == [None, None]


# ---- faults ----------------------------------------------------------------------------------------------------------


def stopped(word):
    """The server stops for good at its third step; what the others say of it."""
    try:
        with Run(strategy=word, peer_timeout_s=2) as run:
            server = run.gather(os.getpid())[-1]

            def follow(now):
                if now.step == 3 and run.rank == run.world_size - 1:
                    os.kill(os.getpid(), signal.SIGSTOP)

            progress_marker().listeners += (follow,)
            model = run.model(nn.Linear(1, 1))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
            for (x,) in run.train(run.loader((torch.ones(80, 1),), global_batch=4, micro_batch=1)):
                run.step(model(x).mean())
    except PeerLost as error:
        os.kill(server, signal.SIGKILL)
        return str(error)


def test_a_server_that_stops_is_named_after_the_deadline():
    (worker, server) = run_each(stopped, 2, "parameter-server", timeout_s=30)
    assert worker.value.startswith("rank 1 exited or stopped responding during the pull of parameters: ")
    assert "nothing came in 2 s" in worker.value
    assert str(server.error) == "rank 1 was killed by SIGKILL before the function returned"


def goes_home():
    with Run(strategy="parameter-server", peer_timeout_s=2) as run:
        model = run.model(nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        batches = run.loader((torch.ones(80, 1),), global_batch=4, micro_batch=1)
        for _ in run.epochs(2):
            for (x,) in run.train(batches):
                run.step(model(x).mean())
                if run.progress.step == 2:
                    return


def test_who_leaves_more_than_the_loop_from_its_body_does_not_hang():
    outcomes = run_each(goes_home, 2, timeout_s=30)
    assert all(isinstance(one.error, PeerLost) for one in outcomes), outcomes


SCRIPT = """
import hashlib, torch, lockstep

with lockstep.Run(seed=1, save_every="2 steps") as run:
    model = run.model(torch.nn.Linear(3, 2))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    batches = run.loader((torch.arange(120.0).reshape(-1, 3),), global_batch=4, micro_batch=1)
    for epoch in run.epochs(1):
        for (x,) in run.train(batches):
            run.step(model(x).sin().mean())
    state = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
    if run.leads:
        print("state", state, run.world.generation)
"""


def played(script):
    scope = {}
    exec(script, scope)
    return scope["state"]


def test_a_killed_server_is_the_cause_and_the_restart_ends_in_the_same_bits(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("--nproc-per-node", "3", "--run-dir", "r", "--max-restarts", "1", "--strategy", "parameter-server")
    struck = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", *words, "--fault", "kill rank 2 at step 8", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(lockstep.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    talk = struck.stdout + struck.stderr
    assert struck.returncode == 0, talk
    (single_rank_group,) = run_ranks(played, 1, SCRIPT.replace(', save_every="2 steps"', ""))
    assert f"state {single_rank_group} 1" in talk
    assert "rank 2 of 3 was killed by SIGKILL" in talk
    assert "resumed at step " in talk
