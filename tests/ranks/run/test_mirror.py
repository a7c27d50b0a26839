"""Each rank's part of the state in the host's memory: nothing is lost with a rank, whatever divides the state."""

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lockstep
from campaign_marks import combinations
from lockstep.checkpoint import (
    FlatTree,
    PartWriter,
    list_checkpoints,
    load_part,
    load_tree,
    merge_parts,
    read_part_head,
)
from lockstep.checkpoint import (
    tensors as checkpoint_tensors,
)
from lockstep.collectives import NeighbourLink, TensorShard, open_group
from lockstep.errors import CheckpointError, SettingError
from lockstep.run.recovery.measures_journal import Sums
from lockstep.run.recovery.mirror import MIRROR_PARTS, Mirror, MirrorPlan, open_mirror
from lockstep.run.recovery.newest_state import Left, LeftState, _mapped, choose
from lockstep.strategies import StatePart
from lockstep.testing import run_ranks
from lockstep.world import World
from metric_lines import metric_lines

SOURCE = str(Path(lockstep.__file__).parents[1])

# ---- the file of a part --------------------------------------------------------------------------------------------


def heads(place):
    """The whole slots, the newest one first."""
    found = [head for path in sorted(place.glob("slot-*")) if (head := read_part_head(path)) is not None]
    return sorted(found, key=lambda head: head.step, reverse=True)


def part_at(head):
    return load_part(_mapped(Path(head.path)))


ROWS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@settings(deadline=None, max_examples=25)
@given(rows=ROWS, width=st.integers(1, 3), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_the_parts_of_all_ranks_together_are_the_whole_tree(tmp_path_factory, rows, width, dtype):
    whole = (torch.arange(sum(rows) * width) + 1).reshape(sum(rows), width).to(dtype)
    written, first = [], 0
    for rank, own in enumerate(rows):
        shard = TensorShard.absent(tuple(whole.shape), dtype)
        if own:
            shard = TensorShard(whole[first : first + own], (first, 0), tuple(whole.shape), dtype)
        place = tmp_path_factory.mktemp("parts")
        tree = {"w": shard, "states": {rank: {"step": torch.tensor(rank)}}, "n": (1, 2.5), "b": torch.ones(2)}
        writer = PartWriter(place)
        writer.begin(3, {"rank": rank}, FlatTree.of(tree))
        writer.close()
        (head,) = heads(place)
        assert (head.step, head.about) == (3, {"rank": rank})
        written.append(part_at(head))
        first += own
    tree = merge_parts(written[::-1])
    assert torch.equal(tree["w"], whole)
    assert list(tree["states"]) == list(range(len(rows)))
    assert all(one["step"] == rank for rank, one in tree["states"].items())
    assert (tree["n"], tree["b"].tolist()) == ((1, 2.5), [1.0, 1.0])
    lacking = [part for part, own in zip(written, rows, strict=True) if own][1:]
    if lacking:
        with pytest.raises(CheckpointError, match="do not make it whole"):
            merge_parts(lacking)


def test_of_two_slots_one_is_always_whole(tmp_path, monkeypatch):
    """The process may be killed at any moment; a tensor that changes while it is copied makes no slot."""
    small, large, grown = torch.zeros(3), torch.zeros(1 << 17), 0
    writer = PartWriter(tmp_path)
    for step in range(1, 9):
        small.fill_(step)
        large.fill_(step)
        grown = 10 ** (100 * step)  # so that the text outgrows its room now and then
        writer.begin(step, {"step": step}, FlatTree.of({"small": small, "large": large, "n": grown}))
        small.fill_(-1)  # as running statistics change in the next forward pass
        assert step == 1 or heads(tmp_path)[0].step >= step - 1
        writer.finish()
        newest = heads(tmp_path)[0]
        tree = part_at(newest)
        assert newest.step == step
        assert tree["small"].tolist() == [step] * 3
        assert torch.equal(tree["large"], large)
        assert tree["n"] == grown
    real = checkpoint_tensors.foreach_copy_

    def changing(places, sources, **how):
        real(places, sources, **how)
        for source in sources:
            source.add_(1)

    monkeypatch.setattr(checkpoint_tensors, "foreach_copy_", changing)
    writer.begin(9, {}, FlatTree.of({"small": small, "large": large, "n": grown}))
    writer.finish()
    monkeypatch.undo()
    assert [head.step for head in heads(tmp_path)] == [8], "it was changed while it was copied"
    writer.begin(10, {}, FlatTree.of({"small": small}))
    writer.close()
    assert [head.step for head in heads(tmp_path)] == [10, 8]
    (tmp_path / "slot-0").write_bytes(b"x")
    (tmp_path / "slot-1").write_bytes(b"x" * 64)
    assert heads(tmp_path) == []


def test_statistics_of_any_size_are_copied_before_the_next_forward_pass(tmp_path):
    """Their kernels count no changes, so a copy of half of each would not be told."""
    norm = nn.BatchNorm1d(1 << 15)
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    writer = PartWriter(tmp_path)
    submitted = []
    writer._thread.submit = lambda copy, *args: submitted.append(lambda: copy(*args))
    writer.begin(1, {}, FlatTree.of(norm.state_dict()), at_once=norm.buffers())
    norm(torch.randn(4, 1 << 15))
    (copy,) = submitted  # of weight and bias
    copy()
    (head,) = heads(tmp_path)
    tree = part_at(head)
    assert all(torch.equal(tree[name], tensor) for name, tensor in before.items())
    writer.close()


SLOT = LeftState(
    "generation-0-a", 7, False, 0, 2, "/0", {}, {}, [], part=0, parts=2, sums=Sums({"loss": [1, 0.0, 1]}, {})
)


def test_a_state_of_parts_is_taken_where_all_of_them_are_there():
    other = replace(SLOT, part=1, rank=1, path="/1")
    older = [replace(one, step=6, path=f"{one.path}/6") for one in (SLOT, other)]
    taken = choose([Left((SLOT, older[0])), Left((older[1], other))], None)
    assert taken is not None
    assert [[copy.path for copy in part] for part in taken.parts] == [["/0"], ["/1"]]
    assert taken.sums == Sums({"loss": [2, 0.0, 2]}, {})
    alone = choose([Left((SLOT, *older))], None)
    assert alone is not None
    assert alone.state.step == 6, "the other rank had not finished step 7"
    assert choose([Left((SLOT, older[1]))], None) is None
    assert choose([Left((SLOT, other), {}, ("generation-0-a",))], None) is None


# ---- on two hosts ---------------------------------------------------------------------------------------------------

NODES = st.lists(st.integers(1, 3), min_size=2, max_size=4).map(
    lambda sizes: [node for node, size in enumerate(sizes) for _ in range(size)]
)


@settings(deadline=None)
@given(nodes=NODES, kinds=st.integers(1, 4))
def test_with_any_one_node_lost_every_part_and_every_name_of_each_kind_is_left(nodes, kinds):
    """``kinds``: how many parts the strategy makes; ranks with the same number hold the same one."""
    ranks = range(len(nodes))
    numbers = [rank % kinds for rank in ranks]
    divided = {"carry", "optimizers"} if kinds > 1 else {"carry"}
    names = {"carry", "optimizers", "models"}
    plans = [MirrorPlan.on_two_nodes(nodes, numbers, divided, {"carry"}, rank) for rank in ranks]
    assert len({plan.parts for plan in plans}) == 1
    for rank, plan in enumerate(plans):
        assert nodes[plan.to] != nodes[rank]
        assert [r for r in ranks if rank in plans[r].sources] == [plan.to]
    for lost in set(nodes):
        kept = {}  # by part: the kinds and names that are in it
        for rank, plan in enumerate(plans):
            if nodes[rank] != lost or nodes[plan.to] != lost:
                kept.setdefault(rank, set()).update((numbers[rank], name) for name in plan.own)
            if nodes[rank] != lost and plan.rest is not None:
                kept.setdefault(plan.rest, set()).update((numbers[rank], name) for name in names - plan.own)
        assert sorted(kept) == list(range(plans[0].parts))
        there = set().union(*kept.values())
        assert {(number, name) for number in numbers for name in divided - {"carry"}} <= there
        assert {rank for rank in ranks if ("carry" in plans[rank].own) and rank in kept} == set(ranks)
        assert {name for _, name in there} == names


def mirrored(place, nodes, kinds, steps, full):
    """Ranks that mirror some steps as if they were on these ``nodes``; ``full``: which of them has no room for copies.

    What each was told.
    """
    world = World.from_env(os.environ)
    here, told = nodes[world.rank], []
    alike = [rank for rank, node in enumerate(nodes) if node == here]
    world = replace(
        world, local_rank=alike.index(world.rank), local_size=len(alike), node_rank=here, nodes=len(set(nodes))
    )
    group = open_group(world, torch.device("cpu"), 30.0)
    number = world.rank % kinds
    part = StatePart(number, kinds, None, divides_models=True)
    directory = place / f"node-{here}"
    directory.mkdir(parents=True, exist_ok=True)
    if here == full:
        os.posix_fallocate = partial(allocate_but_for, "copy")
    mirror = open_mirror(directory, group, world, part, lambda: 1 << 30, told.append, on_two_hosts=True)
    for step in range(1, steps + 1):
        own = whole_state(step, len(nodes), kinds)
        first, rows = 0, own["models"]
        for name in ("models", "optimizers") if kinds > 1 else ():
            width = rows.shape[0] // kinds
            first = number * width
            own[name] = TensorShard(own[name][first : first + width], (first, 0), tuple(rows.shape), rows.dtype)
        own["carry"] = {world.rank: own["carry"][world.rank]}
        about = {"step": step, "turn": False, "rank": world.rank, "ranks": len(nodes), "identity": {}, "rows": []}
        mirror.begin(own, about, Sums({"loss": [step * world.rank, 0.0, 1]}, {}), [own["buffer"]])
        mirror.finish()
    group.barrier("all have mirrored")
    mirror.close()
    group.close()
    return told


def allocate_but_for(kind, file, offset, length, real=os.posix_fallocate):
    if f"/{kind}-" in os.readlink(f"/proc/self/fd/{file}"):
        raise OSError(28, "No space left on device")
    real(file, offset, length)


def whole_state(step, ranks, kinds):
    rows = torch.arange(kinds * 40 * 512.0).reshape(kinds * 40, 512) + step  # large enough for the copying thread
    return {
        "models": rows,
        "optimizers": -rows,
        "carry": {rank: torch.tensor([rank, step]) for rank in range(ranks)},
        "buffer": torch.tensor(step),
        "progress": step,
    }


def left_on(directory):
    slots = [slot for kind in MIRROR_PARTS for slot in directory.glob(f"{kind}-*/slot-*")]
    found = [head for slot in slots if (head := read_part_head(slot)) is not None]
    return Left(tuple(LeftState.of("generation-0", head.path, head.about, {}) for head in found))


@pytest.mark.parametrize(("nodes", "kinds", "steps"), [([0, 0, 1, 2], 4, 3), ([0, 0, 1, 1], 2, 2), ([0, 1, 1], 1, 2)])
def test_whichever_host_is_lost_the_others_have_the_whole_last_step(tmp_path, nodes, kinds, steps):
    assert run_ranks(mirrored, len(nodes), tmp_path, nodes, kinds, steps, None) == [[]] * len(nodes)
    for lost in {None, *nodes}:
        choice = choose([left_on(tmp_path / f"node-{node}") for node in sorted({*nodes} - {lost})], None)
        assert choice is not None
        assert (choice.state.step, choice.sums.train["loss"][0]) == (steps, steps * sum(range(len(nodes))))
        tree = merge_parts([part_at(copies[0]) for copies in choice.parts])
        expected = whole_state(steps, len(nodes), kinds)
        assert FlatTree.of(tree).checksums() == FlatTree.of(expected).checksums(), f"without node {lost}"
        assert tree["progress"] == steps


def test_a_host_without_room_for_copies_costs_a_word_and_not_the_run(tmp_path):
    nodes = [0, 1]
    word = "the state is not copied to another host any more: rank 1: it has no room"
    assert run_ranks(mirrored, 2, tmp_path, nodes, 2, 3, 1) == [[word], []]
    found = [left_on(tmp_path / f"node-{node}") for node in nodes]
    assert choose(found, None).state.step == 3
    assert choose(found[1:], None) is None, "the part of rank 0 is lost with its host"
    assert choose(found[:1], None).state.step == 3


def test_a_host_without_room_for_its_own_costs_a_word_and_not_the_run(tmp_path, monkeypatch):
    """Though a part of it is being sent at that moment, from memory that must not be closed yet."""
    monkeypatch.setattr(os, "posix_fallocate", partial(allocate_but_for, "rest"))
    ours, theirs = socket.socketpair()
    link, told = NeighbourLink(ours, [], 0.2), []  # to one that never reads, and there is more than what is buffered
    plan = MirrorPlan(parts=2, own=frozenset({"models"}), rest=1, to=1)
    mirror = Mirror(tmp_path / "memory", World(0, 1, 0, 1, 0, 1), plan, link, {}, lambda: 1 << 30, told.append)
    about = {"step": 1, "turn": False, "rank": 0, "ranks": 1, "identity": {}, "rows": []}
    mirror.begin({"models": torch.ones(1 << 20), "progress": 1}, about, Sums({}, {}), [])
    why = "[Errno 28] No space left on device"
    assert told == [f"the state is not mirrored any more: {why}. It is tried again at each save"]
    mirror.close()
    theirs.close()


def test_a_mirror_that_was_refused_is_tried_again_and_says_each_thing_once(tmp_path, monkeypatch):
    told = []
    plan = MirrorPlan(parts=1, own=None, rest=None, to=None)
    mirror = Mirror(tmp_path / "memory", World(0, 1, 0, 1, 0, 1), plan, None, {}, lambda: 1 << 30, told.append)

    def step(number):
        about = {"step": number, "turn": False, "rank": 0, "ranks": 1, "identity": {}, "rows": []}
        mirror.begin({"models": torch.ones(1 << 10), "progress": number}, about, Sums({}, {}), [])

    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", partial(allocate_but_for, "mirror"))
        step(1)
        assert not mirror.is_used
        mirror.try_again()
        step(2)
    step(3)
    assert not mirror.is_used, "only a save tries again"
    mirror.try_again()
    step(4)
    mirror.finish()
    why = "[Errno 28] No space left on device"
    assert told == [
        f"the state is not mirrored any more: {why}. It is tried again at each save",
        "the state is mirrored again",
    ]
    assert choose([left_on(tmp_path / "memory")], None).state.step == 4
    mirror.close()


# ---- whole runs -----------------------------------------------------------------------------------------------------

TRAIN = """
    import functools, json, os, signal, sys, time
    import torch, lockstep
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import TensorDataset

    torch.manual_seed(1)
    X, Y = torch.randn(96, 8), torch.randint(0, 3, (96,))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(8, 150), nn.BatchNorm1d(150), nn.Linear(150, 3)

        def forward(self, x):
            return self.last(F.dropout(self.norm(self.first(x)).relu(), 0.3, self.training))

    def train(shape, strategy, mirror, kills):
        generation, rank = int(os.environ.get("LOCKSTEP_GENERATION", "0")), int(os.environ["RANK"])
        ranks, last, where = kills[generation] if generation < len(kills) else ([], -1, "")

        def at(step, place):
            if rank in ranks and (step, place) == (last, where):
                while shape == "hang":
                    time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)

        class Deadly(torch.optim.LBFGS if shape == "closure" else torch.optim.AdamW):
            def step(self, closure=None):
                done = run.progress.step
                for group in self.param_groups if where == "half an update" and rank in ranks and done == last else ():
                    group["params"][0].data.add_(1)
                at(done, "half an update")
                super().step(closure)
                at(done, "an update")

        clip = {} if shape == "closure" else {"clip_norm": 1.0}
        given = {"mirror": mirror, "replay": bool(kills), "log_every": "3 steps", **clip}
        with lockstep.Run(seed=3, strategy=strategy, **given) as run:
            net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)) if shape == "closure" else Net()
            model = run.model(net)
            options = {"lr": 0.5, "max_iter": 3} if shape == "closure" else {"lr": 0.05}
            optimizer = run.optimizer(Deadly(model.parameters(), **options))
            batches = run.loader(TensorDataset(X, Y), global_batch=16, micro_batch=4, workers=0)
            held_out = run.loader(TensorDataset(X, Y), global_batch=16, shuffle=False, workers=0, micro_batch=4)
            for epoch in run.epochs(3):
                for x, y in run.train(batches):
                    at(run.progress.step, "a forward pass")
                    if shape == "carry":
                        x = x + 0.1 * run.carry.get("mean", torch.zeros(8))
                        run.carry["mean"] = x.mean(0)
                    out = model(x)
                    run.measure(right=out.argmax(1) == y)
                    if run.step(*((F.cross_entropy, x, y) if shape == "closure" else (F.cross_entropy(out, y),))):
                        at(run.progress.step, "the body")
                for number, (x, y) in enumerate(run.evaluate(held_out)):
                    if number == 1:
                        at(run.progress.step, "an evaluation")
                    run.measure(held=model(x).argmax(1) == y)
                run.log()

    if __name__ == "__main__":
        for name, (shape, ranks, strategy, mirror, kills) in json.loads(sys.argv[1]).items():
            main = functools.partial(train, shape, strategy, mirror, kills)
            hangs = {"hang_after_s": 20.0, "on_hang": "restart"} if shape == "hang" else {}
            lockstep.launch(main, ranks=ranks, run_dir=name, max_restarts=len(kills), **hangs)
"""
#: By run: shape, ranks, strategy and whether it mirrors; who is killed after how many steps and where, one generation
#: after the other, and from where the next one goes on.
RUNS = {
    "plain": ("plain", 1, "none", False, []),
    "zero": ("plain", 2, "zero", True, [([0], 4, "half an update", 4), ([1], 6, "an evaluation", 6)]),
    "fsdp": ("plain", 2, "fsdp", True, [([1], 3, "an update", 3), ([0, 1], 9, "the body", 8)]),
    "hsdp": ("plain", 4, "hsdp:shard=2", False, [([1], 4, "half an update", 5), ([2], 8, "a forward pass", 8)]),
    "hang": ("hang", 2, "ddp", False, [([1], 8, "a forward pass", 8)]),
    "plain-carry": ("carry", 1, "none", False, []),
    "carry": ("carry", 2, "ddp", False, [([1], 8, "half an update", 8)]),
    "plain-closure": ("closure", 1, "none", False, []),
    "closure": ("closure", 2, "ddp", False, [([0], 8, "half an update", 8)]),
}


def final_state(place):
    """The bits of models, of optimizers and of what is carried, as the last checkpoint has them."""
    (*_, last) = sorted(list_checkpoints(place / "checkpoints"), key=lambda one: one.step)
    tree = load_tree(last.path)
    return FlatTree.of({name: tree[name] for name in ("models", "optimizers", "carry")}).checksums()


#: What runs at once, first the one that the others are compared with.
GROUPS = {
    "fsdp": ["plain", "fsdp"],
    "zero, hsdp and a hang": ["plain", "zero", "hsdp", "hang"],
    "carry": ["plain-carry", "carry"],
    "closure": ["plain-closure", "closure"],
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("group", combinations(GROUPS, campaign=lambda group: group != "fsdp"))
def test_no_step_is_lost_where_ranks_hold_parts_or_hang(tmp_path, group):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    plain, *killed = GROUPS[group]
    cases = {name: [*RUNS[name][:-1], [kill[:3] for kill in RUNS[name][-1]]] for name in GROUPS[group]}
    ended = subprocess.run(
        [sys.executable, script, json.dumps(cases)],
        cwd=tmp_path,
        env={n: v for n, v in os.environ.items() if not n.startswith(("LOCKSTEP_", "OMP_"))} | {"PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    for name in killed:
        log = (tmp_path / name / "logs" / "rank-0000.log").read_text()
        went_on = [int(step) for step in re.findall(r"^goes on from step (\d+) ", log, re.MULTILINE)]
        expected = [step for *_, step in RUNS[name][-1]]
        if name == "hsdp":  # without a mirror the parts may be of two steps: then it is the checkpoint, here none
            assert set(went_on) <= {*expected, *(step - 1 for step in expected)}, (name, said)
        else:
            assert went_on == expected, (name, said)
        assert final_state(tmp_path / name) == final_state(tmp_path / plain), name
        assert metric_lines(tmp_path / name) == metric_lines(tmp_path / plain), name
    if "hang" in killed:
        assert re.search(r"rank 1 of 2 \(host .*\) hung", said), said


def test_a_mirror_that_nobody_would_look_into_is_refused():
    with pytest.raises(SettingError, match="mirror=True with emergency=False"):
        lockstep.Run(mirror=True, emergency=False)


def test_a_strategy_under_which_a_rank_cannot_tell_its_part_says_so():
    with pytest.raises(SettingError, match=r"mirror=True: under strategy='local-sgd'"):
        lockstep.Run(strategy="local-sgd", mirror=True)
